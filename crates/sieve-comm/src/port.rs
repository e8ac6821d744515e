//! A free port for rank 0, reserved until rank 0 listens on it.
use socket2::{Domain, Socket, Type};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};

/// A port of 127.0.0.1 on which rank 0 can listen, and which the system gives to no other process meanwhile.
///
/// Between choosing a free port and listening on it another process could be given the same one. A socket that is bound
/// to the port and never listens prevents that. It accepts no connections, even where a child process that another
/// thread starts inherits a copy of it.
#[derive(Debug)]
pub struct ReservedPort {
    number: u16,
    _socket: Socket,
}

impl ReservedPort {
    /// Reserves a free port for as long as the returned value lives.
    ///
    /// # Errors
    /// No port is free.
    pub fn take() -> io::Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // Rank 0's listener sets this too, so that both can be bound to the port.
        socket.set_reuse_address(true)?;
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        let address = socket.local_addr()?.as_socket();
        let number = address.map(|address| address.port());
        Ok(Self { number: number.ok_or_else(|| io::Error::other("a socket without a port"))?, _socket: socket })
    }

    /// Number of the reserved port.
    pub fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn rank_0_can_listen_on_a_reserved_port() {
        let port = ReservedPort::take().unwrap();
        let address = ("127.0.0.1", port.number());
        assert!(TcpStream::connect(address).is_err(), "nobody listens yet");
        let listener = TcpListener::bind(address).unwrap();
        assert!(TcpListener::bind(address).is_err(), "one is enough");
        TcpStream::connect(address).unwrap();
        listener.accept().unwrap();
    }

    #[test]
    fn a_reserved_port_stays_usable_while_other_threads_start_processes() {
        let ended = AtomicBool::new(false);
        let start = || {
            while !ended.load(Ordering::Acquire) {
                let mut process = Command::new("true").stdout(Stdio::null()).spawn().unwrap();
                process.wait().unwrap();
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(start);
            }
            let listening = (0..300).map(|_| {
                let port = ReservedPort::take().unwrap();
                TcpListener::bind(("127.0.0.1", port.number())).map(drop)
            });
            let listening = listening.collect::<io::Result<Vec<()>>>();
            ended.store(true, Ordering::Release);
            listening.unwrap();
        });
    }
}
