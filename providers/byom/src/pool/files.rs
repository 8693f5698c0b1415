//! Reads and writes the files of a machine by SFTP. Each answer is bounded in time and size.

use std::time::Duration;

use russh_sftp::client::error::Error as SftpError;
use russh_sftp::client::rawsession::SftpResult;
use russh_sftp::client::{Config, RawSftpSession};
use russh_sftp::protocol::{FileAttributes, OpenFlags, Packet, StatusCode};
use tokio::io::{AsyncRead, AsyncWrite};

use super::fault::Fault;

/// Folder of the files, as the confined user of the machine sees it.
const FOLDER: &str = "/cidata";
/// Longest piece of a write. Every server of SFTP takes as much.
const PIECE: usize = 32_000;
/// Longest packet that is read.
const MAX_PACKET: u32 = 64 << 10;
/// OpenSSH's extension that replaces a file by another one at once.
const POSIX_RENAME: &str = "posix-rename@openssh.com";
/// OpenSSH's extension that gives a file a second name, unless a file has that name.
const HARDLINK: &str = "hardlink@openssh.com";

/// Open SFTP session with a machine.
pub(crate) struct MachineFiles(RawSftpSession);

impl MachineFiles {
    /// Begins a session on the stream of the subsystem `sftp`. `patience` is the longest wait for an answer.
    pub(crate) async fn open<S>(stream: S, patience: Duration) -> Result<MachineFiles, Fault>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let request_timeout_secs = patience.as_secs().max(1);
        let config = Config { max_packet_len: MAX_PACKET, request_timeout_secs, ..Config::default() };
        let session = RawSftpSession::new_with_config(stream, config);
        let version = session.init().await.map_err(|error| fault("begin SFTP", &error))?;
        for extension in [POSIX_RENAME, HARDLINK] {
            if !version.extensions.contains_key(extension) {
                let text = format!("its SFTP server lacks {extension}; use OpenSSH's internal-sftp");
                return Err(Fault::Refused(text));
            }
        }
        Ok(MachineFiles(session))
    }

    /// Reads a file of at most `limit` bytes; `None` without such a file.
    pub(crate) async fn read(&self, name: &str, limit: usize) -> Result<Option<Vec<u8>>, Fault> {
        let opened = self.0.open(path(name), OpenFlags::READ, FileAttributes::empty()).await;
        let Some(handle) = unless_missing(opened).map_err(|error| fault(&format!("open {name}"), &error))?
        else {
            return Ok(None);
        };
        let content = self.content(&handle.handle, limit).await;
        let closed = self.0.close(handle.handle).await;
        let content = content.map_err(|error| fault(&format!("read {name}"), &error))?;
        closed.map_err(|error| fault(&format!("close {name}"), &error))?;
        if content.len() > limit {
            return Err(Fault::Refused(format!("{name} has more than {limit} bytes; reboot the machine")));
        }
        Ok(Some(content))
    }

    async fn content(&self, handle: &str, limit: usize) -> SftpResult<Vec<u8>> {
        let mut content = Vec::new();
        while content.len() <= limit {
            let rest = u32::try_from(limit + 1 - content.len()).unwrap_or(MAX_PACKET);
            match self.0.read(handle, content.len() as u64, rest.min(MAX_PACKET / 2)).await {
                Ok(data) if !data.data.is_empty() => content.extend(data.data),
                Ok(_) => break,
                Err(SftpError::Status(status)) if status.status_code == StatusCode::Eof => break,
                Err(error) => return Err(error),
            }
        }
        Ok(content)
    }

    /// Whether there is a file of this name.
    pub(crate) async fn has(&self, name: &str) -> Result<bool, Fault> {
        let found = unless_missing(self.0.lstat(path(name)).await);
        Ok(found.map_err(|error| fault(&format!("look for {name}"), &error))?.is_some())
    }

    /// Writes a complete file under a name of its own, and returns that name.
    pub(crate) async fn write_aside(&self, name: &str, content: &[u8]) -> Result<String, Fault> {
        // Two processes that write the same file do not disturb each other.
        let random = getrandom::u64().map_err(|error| Fault::Away(format!("get a random name: {error}")))?;
        let aside = format!("{name}.{random:016x}");
        let written = self.write(&aside, OpenFlags::CREATE | OpenFlags::EXCLUDE, content).await;
        if let Err(SftpError::Status(_)) = &written {
            self.remove(&aside).await;
        }
        written.map_err(|error| fault(&format!("write {name}"), &error))?;
        Ok(aside)
    }

    /// Gives a file that was written aside its name, unless there is a file of that name. Returns whether it was done.
    pub(crate) async fn link_aside(&self, aside: &str, name: &str) -> Result<bool, Fault> {
        let linked = self.0.hardlink(path(aside), path(name)).await;
        match &linked {
            Ok(_) => {}
            // SFTP has no code for a file that is there; the caller reads it.
            Err(SftpError::Status(_)) if self.has(name).await? => {}
            Err(error) => return Err(fault(&format!("make {name}"), error)),
        }
        self.remove(aside).await;
        Ok(linked.is_ok())
    }

    /// Renames a file that was written aside, in place of any file of that name.
    pub(crate) async fn rename_aside(&self, aside: &str, name: &str) -> Result<(), Fault> {
        let text = |text: &str| {
            [&u32::try_from(text.len()).unwrap_or_default().to_be_bytes(), text.as_bytes()].concat()
        };
        let data = [text(&path(aside)), text(&path(name))].concat();
        match self.0.extended(POSIX_RENAME, data).await {
            Ok(Packet::Status(status)) if status.status_code == StatusCode::Ok => Ok(()),
            Ok(Packet::Status(status)) => Err(fault(&format!("rename {name}"), &status.into())),
            Ok(_) => Err(fault(&format!("rename {name}"), &SftpError::UnexpectedPacket)),
            Err(error) => Err(fault(&format!("rename {name}"), &error)),
        }
    }

    /// Makes an empty file; one that is there is fine. It has its effect when it is open.
    pub(crate) async fn touch(&self, name: &str) -> Result<(), Fault> {
        let opened = self.0.open(path(name), OpenFlags::WRITE | OpenFlags::CREATE, attributes()).await;
        let handle = opened.map_err(|error| fault(&format!("make {name}"), &error))?;
        if let Err(error) = self.0.close(handle.handle).await {
            tracing::debug!(name, %error, "cannot close a file of a machine");
        }
        Ok(())
    }

    async fn write(&self, name: &str, flags: OpenFlags, content: &[u8]) -> SftpResult<()> {
        let handle = self.0.open(path(name), OpenFlags::WRITE | flags, attributes()).await?.handle;
        let mut at = 0;
        let mut written = Ok(());
        for piece in content.chunks(PIECE) {
            written = self.0.write(handle.as_str(), at, piece.to_vec()).await.map(drop);
            if written.is_err() {
                break;
            }
            at += piece.len() as u64;
        }
        let closed = self.0.close(handle).await.map(drop);
        written.and(closed)
    }

    /// Removes a file of ours that has no use any more. Otherwise it stays until the machine reboots, and does no harm.
    async fn remove(&self, name: &str) {
        if let Err(error) = self.0.remove(path(name)).await {
            tracing::debug!(name, %error, "cannot remove a file of a machine");
        }
    }
}

/// Returns the attributes of new files: only their user may read them.
fn attributes() -> FileAttributes {
    FileAttributes { permissions: Some(0o600), ..FileAttributes::empty() }
}

fn path(name: &str) -> String {
    format!("{FOLDER}/{name}")
}

fn unless_missing<T>(answer: SftpResult<T>) -> SftpResult<Option<T>> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(SftpError::Status(status)) if status.status_code == StatusCode::NoSuchFile => Ok(None),
        Err(error) => Err(error),
    }
}

fn fault(attempt: &str, error: &SftpError) -> Fault {
    let SftpError::Status(status) = error else {
        return Fault::Away(format!("{attempt}: {error}"));
    };
    let remedy = match status.status_code {
        StatusCode::PermissionDenied => "let the user of provider.byom.username write to its folder cidata",
        StatusCode::NoSuchFile => "make the folder cidata below the root of its user",
        _ => "its tmpfs cidata may be full; reboot the machine",
    };
    Fault::Refused(format!("{attempt}: {}; {remedy}", status.status_code))
}
