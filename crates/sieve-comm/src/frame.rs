//! Messages on a TCP connection: a kind, a length, bytes.
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// The longest message: what a receiver allocates before it has read a byte.
const MAX_BYTES: u64 = 1 << 30;
/// Bytes converted at a time on their way to or from `f32`.
const PIECE: usize = 1 << 16;

/// Sends a message, or nothing of one that the receiver would refuse.
pub(crate) fn send(mut stream: &TcpStream, kind: u8, bytes: &[u8]) -> io::Result<()> {
    require_length(bytes.len() as u64)?;
    let mut message = Vec::with_capacity(9 + bytes.len());
    message.push(kind);
    message.extend((bytes.len() as u64).to_le_bytes());
    message.extend(bytes);
    stream.write_all(&message)
}

fn require_length(len: u64) -> io::Result<()> {
    match len > MAX_BYTES {
        true => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "a message of {len} bytes, more than {MAX_BYTES}: shorter rows or more processes a row make it shorter"
            ),
        )),
        false => Ok(()),
    }
}

/// Waits for a message: its kind, and its bytes.
pub(crate) fn receive(mut stream: &TcpStream) -> io::Result<(u8, Vec<u8>)> {
    receive_at_most(MAX_BYTES, &mut stream)
}

/// The same for a message of `max_bytes` at most.
pub(crate) fn receive_at_most(max_bytes: u64, stream: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let (kind, len) = receive_head(stream)?;
    if len > max_bytes {
        return Err(io::Error::other("a message of another protocol"));
    }
    let mut bytes = vec![0; len as usize];
    stream.read_exact(&mut bytes)?;
    Ok((kind, bytes))
}

/// The kind and the length of the next message.
pub(crate) fn receive_head(stream: &mut impl Read) -> io::Result<(u8, u64)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let (kind, len) = head.split_at(1);
    let len = len.try_into().expect("eight bytes");
    Ok((kind[0], u64::from_le_bytes(len)))
}

/// Sends numbers as one message.
pub(crate) fn send_numbers(mut stream: &TcpStream, kind: u8, values: &[f32]) -> io::Result<()> {
    let mut head = vec![kind];
    head.extend((4 * values.len() as u64).to_le_bytes());
    stream.write_all(&head)?;
    let mut bytes = Vec::with_capacity(4 * PIECE);
    for piece in values.chunks(PIECE) {
        bytes.clear();
        piece.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        stream.write_all(&bytes)?;
    }
    Ok(())
}

/// Reads as many numbers as `values` has, after their head; `take` puts each where it belongs.
pub(crate) fn receive_numbers(mut stream: &TcpStream, values: &mut [f32], take: fn(&mut f32, f32)) -> io::Result<()> {
    let mut bytes = vec![0; 4 * PIECE.min(values.len())];
    for piece in values.chunks_mut(PIECE) {
        let bytes = &mut bytes[..4 * piece.len()];
        stream.read_exact(bytes)?;
        for (value, bytes) in piece.iter_mut().zip(bytes.chunks_exact(4)) {
            take(value, f32::from_le_bytes(bytes.try_into().expect("four bytes")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_the_receiver_would_refuse_is_not_sent() {
        require_length(MAX_BYTES).expect("the longest");
        let error = require_length(MAX_BYTES + 1).expect_err("too long").to_string();
        assert!(
            error.starts_with("a message of 1073741825 bytes, more than 1073741824"),
            "{error}"
        );
    }
}
