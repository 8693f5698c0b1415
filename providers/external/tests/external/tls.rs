//! Tests mutual TLS: a peer with a wrong certificate, or without one, is refused with the reason.

use super::common;
use super::pki;
use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::Duration;

use common::{Folder, config, key, request, until};
use peerpod_provider_api::{Error, Provider};
use peerpod_provider_external::serve::{Serving, listen_with_tls};
use peerpod_provider_external::{Endpoint, External, ExternalConfig, TlsFiles};
use peerpod_provider_fake::{Fake, FakeConfig};
use pki::Pki;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

async fn serve(folder: &Folder, files: &TlsFiles, address: &str) -> (Serving, SocketAddr) {
    // A service that was just stopped may hold the port a moment longer.
    let listener = until("the port is free", || async { TcpListener::bind(address).await.ok() }).await;
    let address = listener.local_addr().unwrap();
    let dir = folder.0.join("fake");
    fs::create_dir_all(&dir).unwrap();
    let fake: Arc<dyn Provider> = Arc::new(Fake::new(FakeConfig {
        dir,
        first_address: [10, 200, 0, 1].into(),
        max_batch: 4,
        takes: Duration::ZERO,
    }));
    let listener = listen_with_tls(listener, files).unwrap();
    (Serving::start("fake", listener, move |_: &_| Ok(fake.clone())).await.unwrap(), address)
}

fn dial(address: SocketAddr, files: &TlsFiles) -> ExternalConfig {
    let server_name = "provider.test".try_into().unwrap();
    let endpoint = Endpoint::Tls { address: address.to_string(), server_name, files: files.clone() };
    ExternalConfig { handshake_timeout: Duration::from_secs(5), ..config(endpoint) }
}

async fn refused(config: ExternalConfig) -> String {
    match External::open(config).await {
        Ok(_) => panic!("it was opened"),
        Err(error) => {
            assert!(matches!(error, Error::Auth { .. }), "{error:?}");
            error.to_string()
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_right_certificates_on_both_sides_connect() {
    let folder = Folder::new();
    let pki = Pki::new(&folder.0);
    let (_serving, address) = serve(&folder, &pki.server, "127.0.0.1:0").await;
    let provider = External::open(dial(address, &pki.client)).await.unwrap();
    let made = provider.create(&request(), &key(0)).await.unwrap();
    assert_eq!(provider.list_owned().await.unwrap()[0].id, made.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_ca_is_refused_on_both_sides() {
    let folder = Folder::new();
    let (ours, theirs) = (folder.0.join("ours"), folder.0.join("theirs"));
    fs::create_dir_all(&ours).unwrap();
    fs::create_dir_all(&theirs).unwrap();
    let (ours, theirs) = (Pki::new(&ours), Pki::new(&theirs));
    let (_serving, address) = serve(&folder, &theirs.server, "127.0.0.1:0").await;

    let text = refused(dial(address, &ours.client)).await;
    assert!(text.contains("invalid peer certificate"), "{text}");
    // The client trusts the server, but the server does not trust the client. Only the server detects that, and its
    // alert arrives.
    let half = TlsFiles { ca: theirs.client.ca.clone(), ..ours.client };
    let text = refused(dial(address, &half)).await;
    assert!(text.contains("alert") && text.contains("certificates on both sides"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_client_certificate_or_with_a_servers_nothing_is_answered() {
    let folder = Folder::new();
    let pki = Pki::new(&folder.0);
    let (_serving, address) = serve(&folder, &pki.server, "127.0.0.1:0").await;

    // A server certificate is not valid for a client.
    let text = refused(dial(address, &pki.server)).await;
    assert!(text.contains("alert"), "{text}");

    let mut roots = rustls::RootCertStore::empty();
    use rustls_pki_types::pem::PemObject;
    roots.add(rustls_pki_types::CertificateDer::from_pem_file(&pki.client.ca).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut bare = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    bare.alpn_protocols = vec![b"peerpod-provider/1".to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(bare));
    let name = rustls_pki_types::ServerName::try_from("provider.test").unwrap();
    // The client's half of the handshake may end before the server has checked its certificate.
    if let Ok(mut stream) = connector.connect(name, stream).await {
        drop(stream.write_all(&[0; 10]).await);
        let answer = stream.read(&mut [0; 64]).await;
        assert!(answer.is_err(), "it was answered: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_name_or_a_key_for_all_to_read_is_refused() {
    let folder = Folder::new();
    let pki = Pki::new(&folder.0);
    let (_serving, address) = serve(&folder, &pki.server, "127.0.0.1:0").await;
    let mut config = dial(address, &pki.client);
    let Endpoint::Tls { server_name, .. } = &mut config.endpoint else { panic!() };
    *server_name = "another.test".try_into().unwrap();
    let text = refused(config).await;
    assert!(text.contains("another.test"), "{text}");

    fs::set_permissions(&pki.client.key, fs::Permissions::from_mode(0o640)).unwrap();
    let text = refused(dial(address, &pki.client)).await;
    assert!(text.contains("0640") && text.contains("chmod 600"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_comes_back_is_found_again_with_its_new_certificate() {
    let folder = Folder::new();
    let pki = Pki::new(&folder.0);
    let (serving, address) = serve(&folder, &pki.server, "127.0.0.1:0").await;
    let provider = External::open(dial(address, &pki.client)).await.unwrap();
    let made = provider.create(&request(), &key(0)).await.unwrap();
    serving.stop().await;
    // Another CA for both sides, in the same files.
    let again = Pki::new(&folder.0);
    let (_serving, _) = serve(&folder, &again.server, &address.to_string()).await;
    let found =
        until("it is found again", || async { provider.create(&request(), &key(0)).await.ok() }).await;
    assert_eq!(found.id, made.id);
}
