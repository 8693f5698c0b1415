//! Starts real storage servers for tests in the node's network namespace: NFS (nfs-ganesha, which needs nothing of the
//! kernel), SMB (Samba, with its own accounts), iSCSI (tgt) and NBD (qemu-nbd). Each is killed when dropped.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use peerpod_world::{World, eventually_blocking};

use crate::PATIENCE;

/// A running server.
pub struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended before.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl Server {
    /// Starts a server and waits until it listens.
    fn start(world: &World, program: &str, arguments: &[OsString], port: u16) -> Server {
        let arguments: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
        let log = world.folder().join(format!("{program}.log"));
        let mut server = Server(world.spawn(Path::new(program), &arguments, &log).unwrap());
        let listens = eventually_blocking(&format!("{program} listens"), PATIENCE, || {
            let ended = server.0.try_wait().ok().flatten();
            assert!(ended.is_none(), "{program}: {ended:?} {}", fs::read_to_string(&log).unwrap_or_default());
            let wanted = SocketAddr::from(([127, 0, 0, 1], port));
            world.node().run(|| std::net::TcpStream::connect(wanted).is_ok()).ok().filter(|up| *up)
        });
        listens
            .map(drop)
            .unwrap_or_else(|error| panic!("{error}: {}", fs::read_to_string(&log).unwrap_or_default()));
        server
    }
}

/// NFS server, version 4.
pub struct Nfs {
    _server: Server,
    /// Folder that it exports as `/export`.
    pub folder: PathBuf,
}

impl Nfs {
    /// Port that it listens on; the usual port may be taken.
    pub const PORT: u16 = 12049;

    /// Starts an NFS server.
    pub fn start(world: &World) -> Nfs {
        let base = world.folder().join("nfs");
        let (folder, recovery) = (base.join("export"), base.join("recovery"));
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir_all(&recovery).unwrap();
        let configuration = format!(
            "NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {}; Rquota_Port = 0; Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; }}\n\
             NFSv4 {{ RecoveryRoot = \"{}\"; Grace_Period = 5; Lease_Lifetime = 5; Only_Numeric_Owners = true; Delegations = false; }}\n\
             NFS_KRB5 {{ Active_krb5 = false; }}\n\
             EXPORT {{ Export_Id = 1; Path = \"{}\"; Pseudo = /export; Access_Type = RW; Squash = No_Root_Squash; \
             SecType = sys; Protocols = 4; Transports = TCP; FSAL {{ Name = VFS; }} }}\n",
            Nfs::PORT,
            recovery.display(),
            folder.display(),
        );
        let file = base.join("ganesha.conf");
        fs::write(&file, configuration).unwrap();
        let mut arguments: Vec<OsString> = ["-F", "-N", "NIV_EVENT", "-f"].map(OsString::from).into();
        arguments.extend([file.into(), "-L".into(), base.join("log").into()]);
        arguments.extend(["-p".into(), base.join("pid").into()]);
        Nfs { _server: Server::start(world, "ganesha.nfsd", &arguments, Nfs::PORT), folder }
    }
}

/// SMB server with one share and one user.
pub struct Smb {
    _server: Server,
    /// Folder that it shares as `files`.
    pub folder: PathBuf,
}

impl Smb {
    /// Port that it listens on; the usual port may be taken.
    pub const PORT: u16 = 10445;
    /// Its user: a system account without logins.
    pub const USER: &str = "daemon";

    /// Starts an SMB server; its user has this password.
    pub fn start(world: &World, password: &str) -> Smb {
        let base = world.folder().join("smb");
        let folder = base.join("export");
        for name in ["export", "private", "lock", "state", "cache", "pid", "ncalrpc"] {
            fs::create_dir_all(base.join(name)).unwrap();
        }
        let at = |name: &str| base.join(name).display().to_string();
        let configuration = format!(
            "[global]\nserver role = standalone server\nworkgroup = PEERPOD\nsmb ports = {}\ndisable netbios = yes\n\
             server min protocol = SMB3\nmap to guest = never\nload printers = no\nprinting = bsd\n\
             printcap name = /dev/null\ndisable spoolss = yes\nusershare max shares = 0\nobey pam restrictions = no\n\
             passdb backend = tdbsam:{}/passdb.tdb\nprivate dir = {}\nlock directory = {}\nstate directory = {}\n\
             cache directory = {}\npid directory = {}\nncalrpc dir = {}\nlog file = {}\nlog level = 1\n\
             [files]\npath = {}\nread only = no\nvalid users = {}\nforce user = root\n",
            Smb::PORT,
            at("private"),
            at("private"),
            at("lock"),
            at("state"),
            at("cache"),
            at("pid"),
            at("ncalrpc"),
            at("log"),
            folder.display(),
            Smb::USER,
        );
        let file = base.join("smb.conf");
        fs::write(&file, configuration).unwrap();
        let file = format!("--configfile={}", file.display());
        let mut add = Command::new("pdbedit")
            .arg(&file)
            .args(["-a", "-u", Smb::USER, "-t"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        write!(add.stdin.take().unwrap(), "{password}\n{password}\n").unwrap();
        let output = add.wait_with_output().unwrap();
        assert!(output.status.success(), "pdbedit: {}", String::from_utf8_lossy(&output.stderr));
        let arguments =
            ["--foreground", "--no-process-group", "--debug-stdout", file.as_str()].map(OsString::from);
        Smb { _server: Server::start(world, "smbd", &arguments, Smb::PORT), folder }
    }
}

/// iSCSI server with one target.
pub struct Iscsi {
    _server: Server,
}

impl Iscsi {
    /// Port that it listens on.
    pub const PORT: u16 = 13260;
    /// Its target; the file is logical unit 1.
    pub const TARGET: &str = "iqn.2026-01.test.peerpod:disk";

    /// Starts a server for this file.
    pub fn start(world: &World, file: &Path) -> Iscsi {
        let socket = world.folder().join("tgtd");
        let ipc = format!("TGT_IPC_SOCKET={}", socket.display());
        let portal = format!("portal=0.0.0.0:{}", Iscsi::PORT);
        let arguments = [&ipc, "tgtd", "-f", "--iscsi", &portal].map(OsString::from);
        let server = Iscsi { _server: Server::start(world, "env", &arguments, Iscsi::PORT) };
        for words in [
            vec!["--op", "new", "--mode", "target", "--tid", "1", "-T", Iscsi::TARGET],
            vec![
                "--op",
                "new",
                "--mode",
                "logicalunit",
                "--tid",
                "1",
                "--lun",
                "1",
                "-b",
                file.to_str().unwrap(),
            ],
            vec!["--op", "bind", "--mode", "target", "--tid", "1", "-I", "ALL"],
        ] {
            let mut command = Command::new("tgtadm");
            let output =
                command.env("TGT_IPC_SOCKET", &socket).args(["--lld", "iscsi"]).args(&words).output();
            let output = output.unwrap();
            assert!(output.status.success(), "tgtadm {words:?}: {output:?}");
        }
        server
    }
}

/// NBD server.
pub struct Nbd {
    _server: Server,
}

impl Nbd {
    /// Port that it listens on.
    pub const PORT: u16 = 20809;
    /// Its export.
    pub const EXPORT: &str = "disk";

    /// Starts a server for this file.
    pub fn start(world: &World, file: &Path) -> Nbd {
        let port = Nbd::PORT.to_string();
        let words =
            ["--persistent", "--shared=0", "--format=raw", "--export-name", Nbd::EXPORT, "--port", &port];
        let mut arguments: Vec<OsString> = words.map(OsString::from).into();
        arguments.push(file.into());
        Nbd { _server: Server::start(world, "qemu-nbd", &arguments, Nbd::PORT) }
    }
}
