//! Opens a TCP port; on a kernel without IPv6, `[::]` falls back to IPv4. May touch: the port.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use nix::errno::Errno;
use tokio::net::TcpListener;

/// Binds a port. `[::]` means both families, and IPv4 alone on a kernel without IPv6.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(why) if has_no_ipv6(&why) => match instead(address) {
            Some(instead) => TcpListener::bind(instead).await,
            None => Err(why),
        },
        bound => bound,
    }
}

/// Whether IPv6 is not built into the kernel, or switched off.
fn has_no_ipv6(why: &io::Error) -> bool {
    let known = [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL].map(|errno| Some(errno as i32));
    known.contains(&why.raw_os_error())
}

/// Returns the same port for IPv4 if the address means all addresses.
fn instead(address: SocketAddr) -> Option<SocketAddr> {
    let all = address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED);
    all.then(|| SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_addresses_are_had_with_or_without_ipv6() {
        let listener = listen("[::]:0".parse().unwrap()).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    }

    #[test]
    fn only_all_addresses_have_another_family() {
        let text = |address: &str| instead(address.parse().unwrap()).map(|other| other.to_string());
        assert_eq!(text("[::]:8081").as_deref(), Some("0.0.0.0:8081"));
        for other in ["[::1]:8081", "0.0.0.0:8081", "10.0.0.7:1"] {
            assert_eq!(text(other), None, "{other}");
        }
        assert!(has_no_ipv6(&io::Error::from_raw_os_error(Errno::EAFNOSUPPORT as i32)));
        assert!(!has_no_ipv6(&io::Error::from_raw_os_error(Errno::EADDRINUSE as i32)));
    }
}
