//! Calls a cloud over its socket, as a provider does.

use std::time::Duration;

use peerpod_test_clouds::azure::{ASSERTION, CLIENT, SUBSCRIPTION, TENANT};
use peerpod_test_clouds::{Azure, Cloud, Fault};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Sends a request, and reads nothing.
async fn write(endpoint: &str, line: &str, token: &str, body: &str) -> TcpStream {
    let headers = format!("authorization: Bearer {token}\r\ncontent-length: {}\r\n", body.len());
    write_with(endpoint, line, &headers, body).await
}

/// Sends a request with these headers, and reads nothing.
async fn write_with(endpoint: &str, line: &str, headers: &str, body: &str) -> TcpStream {
    let address = endpoint.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("{line} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{headers}\r\n{body}");
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// Sends a request; returns the answer with its head, empty when the connection broke.
async fn send(endpoint: &str, line: &str, token: &str, body: &str) -> String {
    let mut answer = String::new();
    write(endpoint, line, token, body).await.read_to_string(&mut answer).await.ok();
    answer
}

#[tokio::test]
async fn a_token_admits_until_it_expires() {
    let cloud = Cloud::start(Azure::default()).await.unwrap();
    let form = format!(
        "grant_type=client_credentials&client_id={CLIENT}&scope=https%3A%2F%2Fmanagement.azure.com%2F.default\
         &client_assertion_type=urn%3Aietf%3Aparams%3Aoauth%3Aclient-assertion-type%3Ajwt-bearer\
         &client_assertion={ASSERTION}"
    );
    let answer = send(&cloud.endpoint(), &format!("POST /{TENANT}/oauth2/v2.0/token"), "", &form).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("token-1"), "{answer}");
    let list = format!(
        "GET /subscriptions/{SUBSCRIPTION}/resourceGroups/pods/providers/Microsoft.Compute/virtualMachines\
         ?api-version=2024-07-01"
    );
    assert!(send(&cloud.endpoint(), &list, "token-1", "").await.starts_with("HTTP/1.1 200"));
    assert!(send(&cloud.endpoint(), &list, "another", "").await.starts_with("HTTP/1.1 401"));
    cloud.advance(Duration::from_secs(3_600));
    assert!(send(&cloud.endpoint(), &list, "token-1", "").await.contains("ExpiredAuthenticationToken"));
    assert_eq!(cloud.count(Some("VirtualMachines_List")), 3);
}

#[tokio::test]
async fn azure_refuses_a_body_without_a_length() {
    let cloud = Cloud::start(Azure::default()).await.unwrap();
    let vm = format!(
        "/subscriptions/{SUBSCRIPTION}/resourceGroups/pods/providers/Microsoft.Compute/virtualMachines/a\
         /retrieveBootDiagnosticsData?api-version=2024-07-01"
    );
    let token = format!("authorization: Bearer {}\r\n", cloud.token());
    for (method, headers, status) in [
        ("POST", token.clone(), "411"),
        ("PUT", token.clone(), "411"),
        ("GET", token.clone(), "40"),
        ("POST", format!("{token}content-length: 0\r\n"), "404"),
    ] {
        let mut answer = String::new();
        let mut stream = write_with(&cloud.endpoint(), &format!("{method} {vm}"), &headers, "").await;
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{method} {headers}: {answer}");
    }
}

#[tokio::test]
async fn a_broken_connection_is_one_without_an_answer() {
    let cloud = Cloud::start(Azure::default()).await.unwrap();
    cloud.fail("Token", Fault::Reset, 1);
    let head = format!("POST /{TENANT}/oauth2/v2.0/token");
    assert_eq!(send(&cloud.endpoint(), &head, "", "").await, "");
    assert!(send(&cloud.endpoint(), &head, "", "").await.starts_with("HTTP/1.1 400"));
    let witness =
        send(&cloud.witness_endpoint(), "GET /subscriptions/x?api-version=2024-07-01", "", "").await;
    assert!(witness.contains("SubscriptionNotFound"), "{witness}");
    assert_eq!(cloud.calls().iter().map(|call| call.status).collect::<Vec<_>>(), [0, 400]);
}

#[tokio::test]
async fn a_call_takes_effect_although_its_caller_is_gone() {
    let cloud = Cloud::start(Azure::default()).await.unwrap();
    cloud.set_latency(Duration::from_millis(50), Duration::from_secs(3_600));
    let head = format!("POST /{TENANT}/oauth2/v2.0/token");
    let endpoint = cloud.endpoint();
    drop(write(&endpoint, &head, "", "").await);
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while cloud.late() == 0 {
        assert!(std::time::Instant::now() < end, "it never takes effect");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(cloud.count(Some("Token")), 1);
}
