//! A port for rank 0, kept until it listens there.
use std::io;
use std::net::{TcpListener, TcpStream};

/// A port of 127.0.0.1 that rank 0 can listen on by its number, and that the system gives to nobody who asks for a free
/// one.
///
/// Between choosing a free port and listening on it another process could be given the same one. A connection to the
/// port, whose listener is closed, prevents that. Where another thread starts a process meanwhile, the process has a
/// copy of the listener for an instant: who connects to it finds the connection ended.
#[derive(Debug)]
pub struct HeldPort {
    number: u16,
    _ends: [TcpStream; 2],
}

impl HeldPort {
    /// Takes a port that is free. It is held as long as this lives.
    ///
    /// # Errors
    /// No port is free.
    pub fn take() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let near = TcpStream::connect(address)?;
        let (far, _) = listener.accept()?;
        Ok(Self {
            number: address.port(),
            _ends: [near, far],
        })
    }

    /// Its number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_can_listen_on_a_held_port_by_its_number() {
        let port = HeldPort::take().unwrap();
        let address = ("127.0.0.1", port.number());
        assert!(TcpStream::connect(address).is_err(), "nobody listens yet");
        let listener = TcpListener::bind(address).unwrap();
        assert!(TcpListener::bind(address).is_err(), "one is enough");
        TcpStream::connect(address).unwrap();
        listener.accept().unwrap();
    }
}
