//! Runs one etcd and one API server, and makes clients for tests.

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::net::Ipv4Addr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hyper::Request;
use kube::config::AuthInfo;
use kube::{Client, Config};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, PKCS_ECDSA_P256_SHA256,
    PublicKeyData,
};
use serde_json::{Value, json};

use crate::hook::pem;
use crate::process::{Process, free_port, servers};

/// Time limit of a start: half a minute on a loaded machine, five seconds on a quiet one.
const READY_WITHIN: Duration = Duration::from_secs(180);
/// Another process may take a port between the look-up and its use.
const ATTEMPTS: usize = 3;

const API_SERVER: &str = "kube-apiserver";
const ETCD: &str = "etcd";

/// Settings of a cluster.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Controllers of kube-controller-manager to run, by its own names (`garbage-collector-controller`, …). If empty,
    /// kube-controller-manager does not run.
    pub controllers: Vec<&'static str>,
    /// More flags for kube-apiserver.
    pub api_server: Vec<String>,
    /// Address of the node [`NODE`], if a kubelet runs there. The API server listens on it, too.
    pub node: Option<Ipv4Addr>,
}

/// Name of the node with a kubelet.
pub const NODE: &str = "worker-1";

/// A running cluster. Ends when dropped.
pub struct Cluster {
    // They end in this order.
    processes: Vec<Process>,
    folder: PathBuf,
    port: u16,
    ca: Vec<u8>,
    admin_token: String,
    /// Flags of the API server and of etcd, for a restart.
    api_server: Vec<String>,
    etcd: Vec<String>,
}

impl Cluster {
    /// Starts a cluster and waits until it is ready.
    ///
    /// # Errors
    /// When a program is missing, or a server does not become ready; the error has the end of its log.
    pub async fn start(options: Options) -> Result<Cluster> {
        let mut last = None;
        for _ in 0..ATTEMPTS {
            match Cluster::attempt(&options).await {
                Ok(cluster) => return Ok(cluster),
                Err(why) if format!("{why:#}").contains("address already in use") => last = Some(why),
                Err(why) => return Err(why),
            }
        }
        Err(last.context("no attempt")?)
    }

    async fn attempt(options: &Options) -> Result<Cluster> {
        let servers = servers()?;
        let folder = std::env::temp_dir().join(format!("peerpod-kube-{}", random()?));
        fs::create_dir(&folder)?;
        fs::set_permissions(&folder, Permissions::from_mode(0o700))?;
        let ca = certificates(&folder, options.node)?;
        let port = free_port()?;
        let admin_token = random()?;
        let mut cluster = Cluster {
            processes: Vec::new(),
            folder,
            port,
            ca,
            admin_token,
            api_server: Vec::new(),
            etcd: Vec::new(),
        };
        let etcd = cluster.start_etcd()?;
        secret(
            &cluster.path("tokens.csv"),
            &format!("{},admin,admin,system:masters\n", cluster.admin_token),
        )?;
        let token = cluster.admin_token.clone();
        secret(&cluster.path("admin.kubeconfig"), &cluster.kubeconfig(&token))?;
        cluster.start_api_server(&servers, etcd, options)?;
        cluster.wait_ready().await?;
        if !options.controllers.is_empty() {
            cluster.start_controllers(&servers, options)?;
        }
        Ok(cluster)
    }

    fn start_etcd(&mut self) -> Result<u16> {
        let (port, peers) = (free_port()?, free_port()?);
        let flags = [
            format!("--listen-client-urls=http://127.0.0.1:{port}"),
            format!("--advertise-client-urls=http://127.0.0.1:{port}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peers}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peers}"),
            format!("--initial-cluster=default=http://127.0.0.1:{peers}"),
            "--data-dir=etcd".to_owned(),
            // The data need not survive a power cut.
            "--unsafe-no-fsync".to_owned(),
        ];
        self.etcd = flags.to_vec();
        let etcd = Process::start(ETCD, Path::new("etcd"), &flags, &self.folder);
        self.processes
            .push(etcd.context("etcd is Debian's package etcd-server (scripts/setup installs it)")?);
        Ok(port)
    }

    fn start_api_server(&mut self, servers: &Path, etcd: u16, options: &Options) -> Result<()> {
        let mut flags = vec![
            "kube-apiserver".to_owned(),
            format!("--etcd-servers=http://127.0.0.1:{etcd}"),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={}", self.port),
            "--tls-cert-file=server.crt".to_owned(),
            "--tls-private-key-file=server.key".to_owned(),
            "--token-auth-file=tokens.csv".to_owned(),
            "--authorization-mode=Node,RBAC".to_owned(),
            "--enable-admission-plugins=NodeRestriction".to_owned(),
            "--service-cluster-ip-range=10.0.0.0/24".to_owned(),
            "--service-account-issuer=https://peerpod.test".to_owned(),
            "--service-account-key-file=accounts.pub".to_owned(),
            "--service-account-signing-key-file=accounts.key".to_owned(),
        ];
        match options.node {
            // Tests make pods before the controllers have made a default account.
            None => flags.push("--disable-admission-plugins=ServiceAccount".to_owned()),
            Some(address) => flags.extend([
                format!("--advertise-address={address}"),
                "--bind-address=0.0.0.0".to_owned(),
                "--client-ca-file=ca.crt".to_owned(),
                "--kubelet-client-certificate=api-server.crt".to_owned(),
                "--kubelet-client-key=api-server.key".to_owned(),
                "--kubelet-preferred-address-types=InternalIP".to_owned(),
                "--allow-privileged=true".to_owned(),
            ]),
        }
        flags.extend_from_slice(&options.api_server);
        self.api_server.clone_from(&flags);
        self.processes.insert(0, Process::start(API_SERVER, servers, &flags, &self.folder)?);
        Ok(())
    }

    fn start_controllers(&mut self, servers: &Path, options: &Options) -> Result<()> {
        let mut flags = vec![
            "kube-controller-manager".to_owned(),
            "--kubeconfig=admin.kubeconfig".to_owned(),
            format!("--controllers={}", options.controllers.join(",")),
            "--leader-elect=false".to_owned(),
            "--bind-address=127.0.0.1".to_owned(),
            format!("--secure-port={}", free_port()?),
            "--service-account-private-key-file=accounts.key".to_owned(),
        ];
        if options.node.is_some() {
            let more = ["--root-ca-file=ca.crt", "--use-service-account-credentials"];
            flags.extend(more.map(str::to_owned));
        }
        self.processes.insert(0, Process::start("kube-controller-manager", servers, &flags, &self.folder)?);
        Ok(())
    }

    async fn wait_ready(&mut self) -> Result<()> {
        let client = self.client()?;
        let began = Instant::now();
        loop {
            for process in &mut self.processes {
                process.check()?;
            }
            let request = Request::get("/readyz").body(Vec::new())?;
            let why = match tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(why)) => why.to_string(),
                Err(_) => "no answer in 5 s".to_owned(),
            };
            if began.elapsed() > READY_WITHIN {
                bail!(
                    "kube-apiserver is not ready after {READY_WITHIN:?}: {why}\n{}",
                    self.processes[0].last_lines()
                );
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Kills the API server with SIGKILL.
    pub fn kill_api_server(&mut self) {
        self.processes.retain(|process| process.name() != API_SERVER);
    }

    /// Restarts the API server on the same port, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn restart_api_server(&mut self) -> Result<()> {
        self.kill_api_server();
        let again = Process::start(API_SERVER, &servers()?, &self.api_server, &self.folder)?;
        self.processes.insert(0, again);
        self.wait_ready().await
    }

    /// Kills etcd with SIGKILL, starts it with its data, and waits until the API server is ready.
    ///
    /// # Errors
    /// When it does not become ready.
    pub async fn restart_etcd(&mut self) -> Result<()> {
        self.processes.retain(|process| process.name() != ETCD);
        self.processes.push(Process::start(ETCD, Path::new("etcd"), &self.etcd, &self.folder)?);
        self.wait_ready().await
    }

    /// Stops the API server like a hanging machine: it accepts connections and never answers. `false` resumes it.
    ///
    /// # Errors
    /// When it does not run.
    pub fn freeze_api_server(&self, frozen: bool) -> Result<()> {
        let process = self.processes.iter().find(|process| process.name() == API_SERVER);
        process.context("the API server does not run")?.signal(if frozen { "STOP" } else { "CONT" })
    }

    /// Returns the API server's port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the API server's URL.
    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Returns a folder that is removed with the cluster.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns a client with all rights.
    ///
    /// # Errors
    /// Never with a started cluster.
    pub fn client(&self) -> Result<Client> {
        self.client_with(&self.admin_token)
    }

    /// Returns a client with this bearer token.
    ///
    /// # Errors
    /// As [`Cluster::client`].
    pub fn client_with(&self, token: &str) -> Result<Client> {
        let mut config = Config::new(self.url().parse()?);
        config.root_cert = Some(vec![self.ca.clone()]);
        config.auth_info = AuthInfo { token: Some(token.to_owned().into()), ..AuthInfo::default() };
        Ok(Client::try_from(config)?)
    }

    /// Returns a kubeconfig's text with this token.
    pub fn kubeconfig(&self, token: &str) -> String {
        self.kubeconfig_with(&json!({"token": token}))
    }

    /// Returns the text of a kubelet's kubeconfig, with the certificate of [`NODE`].
    pub fn kubeconfig_of_node(&self) -> String {
        let [certificate, key] = ["node.crt", "node.key"].map(|file| self.path(file));
        self.kubeconfig_with(&json!({"client-certificate": certificate, "client-key": key}))
    }

    fn kubeconfig_with(&self, user: &Value) -> String {
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url(), "certificate-authority": self.path("ca.crt")}}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        });
        config.to_string()
    }

    /// Returns the output of `kubectl` with these arguments, run with all rights.
    ///
    /// # Errors
    /// When it fails; the error has its error output.
    pub fn kubectl(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new(servers()?);
        command.arg("kubectl").args(words).current_dir(&self.folder);
        command.env("KUBECONFIG", self.path("admin.kubeconfig")).env("HOME", &self.folder);
        let done = command.output()?;
        if !done.status.success() {
            bail!("kubectl {}: {}", words.join(" "), String::from_utf8_lossy(&done.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&done.stdout).into_owned())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.processes.clear();
        if std::thread::panicking() {
            eprintln!("the cluster's logs stay in {}", self.folder.display());
        } else {
            drop(fs::remove_dir_all(&self.folder));
        }
    }
}

/// Writes a CA, the server's certificate, and the key that signs service accounts' tokens; with a node, also the
/// certificates of its kubelet and of the API server as the kubelet's client. Returns the CA as DER.
fn certificates(folder: &Path, node: Option<Ipv4Addr>) -> Result<Vec<u8>> {
    let name_of_node = format!("system:node:{NODE}");
    let key = || KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256);
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, key()?)?;
    let issue = |name: &str, subject: [(DnType, &str); 2], names: Vec<String>| -> Result<()> {
        let key = key()?;
        let mut params = CertificateParams::new(names)?;
        subject.into_iter().for_each(|(part, value)| params.distinguished_name.push(part, value));
        let certificate = params.signed_by(&key, &ca)?;
        fs::write(folder.join(format!("{name}.crt")), pem("CERTIFICATE", certificate.der()))?;
        secret(&folder.join(format!("{name}.key")), &pem("PRIVATE KEY", key.serialized_der()))
    };
    let subject = |group, name| [(DnType::OrganizationName, group), (DnType::CommonName, name)];
    fs::write(folder.join("ca.crt"), pem("CERTIFICATE", ca.der()))?;
    // The second address is that of the Service `kubernetes`.
    let mut names =
        ["127.0.0.1", "10.0.0.1", "localhost", "kubernetes.default.svc"].map(str::to_owned).to_vec();
    if let Some(address) = node {
        names.push(address.to_string());
        issue("node", subject("system:nodes", &name_of_node), vec![NODE.to_owned(), address.to_string()])?;
        issue("api-server", subject("system:masters", "kube-apiserver"), Vec::new())?;
    }
    issue("server", subject("test", "kube-apiserver"), names)?;
    let accounts = key()?;
    secret(&folder.join("accounts.key"), &pem("PRIVATE KEY", accounts.serialized_der()))?;
    fs::write(folder.join("accounts.pub"), pem("PUBLIC KEY", &accounts.subject_public_key_info()))?;
    Ok(ca.der().to_vec())
}

fn secret(path: &Path, text: &str) -> Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes()).with_context(|| format!("write {}", path.display()))
}

fn random() -> Result<String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).context("random bytes")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
