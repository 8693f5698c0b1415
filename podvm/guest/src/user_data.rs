//! Finds user-data.
//!
//! User-data may appear after the start of this program (a seed disk that is mounted late, a file that is still being
//! filled). The guest searches until the lease ends, and logs a fault once, not at every attempt.
//!
//! The file stays in place: it is read-only in most clouds, and the ticket in it is worthless after its first use. The
//! ticket stays valid for the same key, so a guest that lost its certificate can claim it again. A place that the pod's
//! processes could read is overwritten. The guest's state then has a copy, for the next run of this program.

use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_link::user_data::{MAX_LEN, UserData, UserDataError};

use crate::files;
use crate::sources::{CloudSource, UserDataPlace};

const POLL: Duration = Duration::from_millis(50);

/// Pause after an attempt at a cloud's places: a service without user-data is not asked twenty times a second.
const AGAIN: Duration = Duration::from_millis(250);

/// Waits until one of the files, or a place of the detected cloud, holds usable user-data. Returns only on success: the
/// caller's lease ends the wait otherwise. `kept` is the path of the copy.
pub(crate) async fn wait(files: &[PathBuf], sources: &[CloudSource], kept: &Path) -> UserData {
    if let Ok(data) = inspect(&[kept.to_owned()]) {
        return data;
    }
    let mut said = String::new();
    loop {
        let mut why = match inspect(files) {
            Ok(data) => return data,
            Err(why) => why,
        };
        let mut pause = POLL;
        for source in sources.iter().filter(|source| source.is_here()) {
            for place in source.places() {
                let found = place.read().await.and_then(|found| match found {
                    None => Err("does not exist".to_owned()),
                    Some(content) => UserData::parse(&content).map_err(|error| error.to_string()),
                });
                match found {
                    Ok(data) => {
                        tracing::info!(cloud = source.name, %place, "found user-data");
                        if place.is_exposed() {
                            hide(place, &data, kept).await;
                        }
                        return data;
                    }
                    Err(reason) => why += &format!("; {} {place}: {reason}", source.name),
                }
                pause = AGAIN;
            }
        }
        if why != said {
            tracing::info!(reason = %why, "waiting for user-data");
            said = why;
        }
        tokio::time::sleep(pause).await;
    }
}

/// Keeps a copy of user-data, and overwrites their place.
async fn hide(place: &UserDataPlace, data: &UserData, kept: &Path) {
    let written = files::write(kept, data.to_json().as_bytes()).map_err(|error| error.to_string());
    let hidden = match written {
        Ok(()) => place.erase().await,
        // Without a copy, the next run of this program needs the place.
        failed => failed,
    };
    if let Err(error) = hidden {
        tracing::warn!(error, %place, "cannot overwrite user-data: the pod's processes can read them");
    }
}

/// Reads all files once. The error names the reasons, without any of the content.
fn inspect(files: &[PathBuf]) -> Result<UserData, String> {
    let mut reasons = Vec::new();
    for path in files {
        // One byte over the limit is read, which distinguishes an oversize file from a missing one.
        match files::read(path, MAX_LEN as u64) {
            Ok(None) => reasons.push(format!("{} does not exist", path.display())),
            Err(error) => reasons.push(format!("{}: {error}", path.display())),
            Ok(Some(content)) => match UserData::parse(&content) {
                Ok(data) => return Ok(data),
                Err(UserDataError::Empty) => reasons.push(format!("{} is empty", path.display())),
                Err(error) => reasons.push(format!("{}: {error}", path.display())),
            },
        }
    }
    Err(reasons.join("; "))
}

#[cfg(test)]
mod tests {
    use peerpod_link::user_data::{TicketSecret, UserDataNode, UserDataTicket, VERSION};

    use super::*;
    use crate::files::testing::TempDir;

    fn sample() -> UserData {
        UserData {
            version: VERSION,
            ticket: UserDataTicket { id: "a".repeat(32), secret: TicketSecret::new([1; 32]), claims: 1 },
            node: UserDataNode {
                addresses: vec!["127.0.0.1:1".parse().unwrap()],
                ca_sha256: vec![[2; 32]],
                listen: None,
            },
            lease_seconds: 60,
        }
    }

    #[tokio::test]
    async fn user_data_that_appears_late_and_in_pieces_is_found() {
        let dir = TempDir::new();
        let places = vec![dir.path().join("none"), dir.path().join("user-data")];
        let json = sample().to_json();
        let waiting = tokio::spawn({
            let places = places.clone();
            let kept = dir.path().join("kept");
            async move { wait(&places, &[], &kept).await }
        });
        for part in ["", " ", &json[..40], &json] {
            assert!(!waiting.is_finished());
            std::fs::write(&places[1], part).unwrap();
            tokio::time::sleep(POLL * 2).await;
        }
        let found = tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap();
        assert_eq!(found, sample());
    }

    #[tokio::test]
    async fn a_copy_serves_the_next_run() {
        let dir = TempDir::new();
        let kept = dir.path().join("kept");
        std::fs::write(&kept, sample().to_json()).unwrap();
        let found = tokio::time::timeout(Duration::from_secs(5), wait(&[], &[], &kept)).await.unwrap();
        assert_eq!(found, sample());
    }

    #[test]
    fn errors_name_every_place_and_no_content() {
        let dir = TempDir::new();
        let places = vec![dir.path().join("none"), dir.path().join("bad"), dir.path().join("big")];
        std::fs::write(&places[1], "{\"peerpod\":1,\"password\":\"hunter2\"}").unwrap();
        std::fs::write(&places[2], vec![b'x'; MAX_LEN + 1]).unwrap();
        let why = inspect(&places).unwrap_err();
        for part in ["none does not exist", "bad: user-data is not in the format", "big: more than"] {
            assert!(why.contains(part), "{why}");
        }
        assert!(!why.contains("hunter2"));
    }
}
