//! Sends one request to a metadata service in minimal HTTP/1.1: an address that is a number, one answer, then the
//! connection ends. `httparse` parses the head. The caller bounds the time; the size is bounded here.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::LIMIT;

/// Size limit of an answer's head.
const MAX_HEAD: usize = 16 << 10;
/// Size limit of an answer: head, body, and the overhead of chunks.
const MAX_ANSWER: usize = MAX_HEAD + 2 * LIMIT as usize;
const MOST_HEADERS: usize = 64;
const TOO_LARGE: &str = "the answer is too large to be user-data";

/// Request to a metadata service, with the token that some services demand first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    get: Get,
    token: Option<Token>,
}

/// Token that a metadata service demands before it answers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token {
    put: Get,
    send_as: String,
}

/// A token in a cloud's description.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct WrittenToken {
    put: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    send_as: String,
}

impl Request {
    /// Makes a request from a cloud's description. The error names the part that is wrong.
    pub(crate) fn new(
        url: &str,
        headers: BTreeMap<String, String>,
        token: Option<WrittenToken>,
    ) -> Result<Request, String> {
        let token = token.map(|token| -> Result<Token, String> {
            let put = Get::new(&token.put, token.headers)?;
            check_header(&token.send_as, "")?;
            Ok(Token { put, send_as: token.send_as })
        });
        Ok(Request { get: Get::new(url, headers)?, token: token.transpose()? })
    }

    /// Returns the body of the answer. The error names the reason, without any of the content.
    pub(crate) async fn send(&self) -> Result<Vec<u8>, String> {
        let shown = match &self.token {
            Some(token) => {
                let value = token.put.send("PUT", None).await.map_err(|why| format!("its token: {why}"))?;
                let value = String::from_utf8(value).ok().map(|value| value.trim().to_owned());
                let value = value.filter(|value| check_header(&token.send_as, value).is_ok());
                Some((token.send_as.as_str(), value.ok_or("its token is no text")?))
            }
            None => None,
        };
        self.get.send("GET", shown.as_ref().map(|(name, value)| (*name, value.as_str()))).await
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get.fmt(f)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Get {
    target: SocketAddr,
    host: String,
    path: String,
    headers: BTreeMap<String, String>,
}

impl fmt::Display for Get {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.host, self.path)
    }
}

/// Checks that a header contains nothing that would end its line.
fn check_header(name: &str, value: &str) -> Result<(), String> {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let fits =
        !name.is_empty() && name.bytes().all(is_token) && value.bytes().all(|b| (0x20..0x7f).contains(&b));
    if fits && name.len() <= 256 && value.len() <= 4096 {
        Ok(())
    } else {
        Err(format!("no header: {name:?}"))
    }
}

impl Get {
    fn new(url: &str, headers: BTreeMap<String, String>) -> Result<Get, String> {
        let rest =
            url.strip_prefix("http://").ok_or_else(|| format!("{url:?} does not begin with http://"))?;
        let at = rest.find('/').ok_or_else(|| format!("{url:?} has no path"))?;
        let (host, path) = rest.split_at(at);
        let target = super::target(host).ok_or_else(|| {
            format!("{url:?}: a service is named by its address, because this program does not use DNS")
        })?;
        if !path.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(format!("{url:?} has more than a path"));
        }
        headers.iter().try_for_each(|(name, value)| check_header(name, value))?;
        Ok(Get { target, host: host.to_owned(), path: path.to_owned(), headers })
    }

    /// Sends the request, and waits for the whole answer. The error names the reason for a missing one.
    async fn send(&self, method: &str, also: Option<(&str, &str)>) -> Result<Vec<u8>, String> {
        let mut stream =
            TcpStream::connect(self.target).await.map_err(|error| format!("connect: {error}"))?;
        let agent = concat!("peerpod-guest/", env!("CARGO_PKG_VERSION"));
        let mut request = format!("{method} {} HTTP/1.1\r\nHost: {}\r\n", self.path, self.host);
        request += &format!("User-Agent: {agent}\r\nAccept: */*\r\nConnection: close\r\n");
        if method != "GET" {
            request += "Content-Length: 0\r\n";
        }
        let own = self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in own.chain(also) {
            request += &format!("{name}: {value}\r\n");
        }
        request += "\r\n";
        stream.write_all(request.as_bytes()).await.map_err(|error| format!("ask: {error}"))?;
        let mut got = Vec::new();
        loop {
            let length =
                stream.read_buf(&mut got).await.map_err(|error| format!("read the answer: {error}"))?;
            if got.len() > MAX_ANSWER {
                return Err(TOO_LARGE.to_owned());
            }
            if let Some(answer) = parse(&got, length == 0)? {
                return answer.body();
            }
            if length == 0 {
                return Err(format!("the answer ends after {} bytes", got.len()));
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct HttpAnswer {
    status: u16,
    body: Vec<u8>,
}

impl HttpAnswer {
    fn body(self) -> Result<Vec<u8>, String> {
        match self.status {
            200..300 => Ok(self.body),
            404 => Err("404: it has none; was the VM made without user-data?".to_owned()),
            status @ (401 | 403) => {
                Err(format!("{status}: it requires a token or header that the request lacked"))
            }
            status => Err(format!("it answered {status}")),
        }
    }
}

/// Returns the answer, once it is complete. `ended`: no more bytes will come.
pub(crate) fn parse(got: &[u8], ended: bool) -> Result<Option<HttpAnswer>, String> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut head = httparse::Response::new(&mut headers);
    let begin = match head.parse(got) {
        Ok(httparse::Status::Complete(begin)) => begin,
        Ok(httparse::Status::Partial) if got.len() < MAX_HEAD => return Ok(None),
        Ok(httparse::Status::Partial) => return Err("the answer's head does not end".to_owned()),
        Err(error) => return Err(format!("no HTTP: {error}")),
    };
    let status = head.code.unwrap_or_default();
    let rest = got.get(begin..).unwrap_or_default();
    let header = |name: &str| {
        let mut all = head.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        all.next().map(|header| String::from_utf8_lossy(header.value).trim().to_ascii_lowercase())
    };
    let body = if header("transfer-encoding").is_some_and(|coding| coding == "chunked") {
        chunks(rest)?
    } else if let Some(length) = header("content-length") {
        let length: usize = length.parse().map_err(|_| "the answer has no length".to_owned())?;
        if length > LIMIT as usize {
            return Err(format!("an answer of {length} bytes is too large to be user-data"));
        }
        rest.get(..length).map(<[u8]>::to_vec)
    } else if matches!(status, 204 | 304) {
        Some(Vec::new())
    } else {
        ended.then(|| rest.to_vec())
    };
    match body {
        Some(body) if body.len() > LIMIT as usize => Err(TOO_LARGE.to_owned()),
        body => Ok(body.map(|body| HttpAnswer { status, body })),
    }
}

/// Returns the content of the chunks, once the last is there.
fn chunks(mut rest: &[u8]) -> Result<Option<Vec<u8>>, String> {
    let mut body = Vec::new();
    loop {
        let (begin, length) = match httparse::parse_chunk_size(rest) {
            Ok(httparse::Status::Complete(found)) => found,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err("the answer's chunks are malformed".to_owned()),
        };
        if length == 0 {
            return Ok(Some(body));
        }
        let length = usize::try_from(length).ok().filter(|length| body.len() + length <= LIMIT as usize);
        let length = length.ok_or(TOO_LARGE)?;
        let Some(chunk) = rest.get(begin..begin + length) else { return Ok(None) };
        body.extend_from_slice(chunk);
        let Some(after) = rest.get(begin + length + 2..) else { return Ok(None) };
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    fn answer(text: &str, ended: bool) -> Result<Option<String>, String> {
        let parsed = parse(text.as_bytes(), ended)?;
        parsed.map(|answer| answer.body().map(|body| String::from_utf8_lossy(&body).into_owned())).transpose()
    }

    #[test]
    fn answers_of_each_kind_are_read() {
        for (text, ended) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", false),
            ("HTTP/1.0 200 OK\r\nServer: x\r\n\r\n{}", true),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n1\r\n{\r\n1;x=y\r\n}\r\n0\r\n\r\n", false),
        ] {
            assert_eq!(answer(text, ended), Ok(Some("{}".to_owned())), "{text}");
            for cut in 0..text.len().saturating_sub(4) {
                assert_eq!(answer(&text[..cut], false), Ok(None), "{cut} of {text}");
            }
        }
        assert!(
            answer("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", false).unwrap_err().contains("404")
        );
        assert!(answer("HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n", false).unwrap_err().contains("token"));
        assert!(answer("HTTP/1.1 302 X\r\nContent-Length: 0\r\n\r\n", false).unwrap_err().contains("302"));
        assert!(
            answer("HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n", false)
                .unwrap_err()
                .contains("large")
        );
        let chunk = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n";
        assert!(answer(chunk, false).unwrap_err().contains("large"));
        assert!(answer("SSH-2.0-OpenSSH\r\n\r\n", false).unwrap_err().contains("no HTTP"));
    }

    #[tokio::test]
    async fn a_service_that_floods_or_disconnects_is_an_error() {
        for (flood, named) in [(true, "too large"), (false, "ends after")] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}/x", listener.local_addr().unwrap());
            let serving = tokio::spawn(async move {
                let (mut stream, _) = listener.accept().await.unwrap();
                let _length = stream.read(&mut [0; 4096]).await.unwrap();
                stream.write_all(b"HTTP/1.1 200 OK\r\n").await.unwrap();
                // Until the client closes the connection.
                while flood && stream.write_all(b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n").await.is_ok() {}
            });
            let asked = Get::new(&url, BTreeMap::new()).unwrap();
            let error = timeout(Duration::from_secs(20), asked.send("GET", None)).await.unwrap().unwrap_err();
            assert!(
                error.contains(named) || error.contains("does not end") || error.contains("no HTTP"),
                "{error}"
            );
            serving.await.unwrap();
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_handled(bytes in proptest::collection::vec(any::<u8>(), 0..300), ended in any::<bool>()) {
            let _maybe = parse(&bytes, ended);
            let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
            let _maybe = parse(&[&head[..], &bytes].concat(), ended);
        }
    }
}
