//! Messages on a TCP connection: one byte of kind, eight bytes of length, then the content.
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// The longest content. A receiver allocates the whole content before it reads the first byte.
const MAX_BYTES: u64 = 1 << 30;
/// f32 numbers converted to or from bytes at a time.
const CHUNK: usize = 1 << 16;

/// Sends a message. Sends nothing, and fails with `InvalidInput`, if it is longer than receivers accept.
pub(crate) fn send(mut stream: &TcpStream, kind: u8, bytes: &[u8]) -> io::Result<()> {
    require_length(bytes.len() as u64)?;
    stream.write_all(&[&head(kind, bytes.len()), bytes].concat())
}

fn head(kind: u8, len: usize) -> Vec<u8> {
    [&[kind][..], &(len as u64).to_le_bytes()].concat()
}

/// Fails for a message that is longer than receivers accept.
fn require_length(len: u64) -> io::Result<()> {
    if len <= MAX_BYTES {
        return Ok(());
    }
    let text = format!(
        "a message of {len} bytes, more than {MAX_BYTES}: shorter rows or more processes a row make it shorter"
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Waits for a message, and returns its kind and its content.
pub(crate) fn receive(stream: &TcpStream) -> io::Result<(u8, Vec<u8>)> {
    receive_at_most(MAX_BYTES, stream)
}

/// Like [`receive`], for a message of at most `max_bytes`.
pub(crate) fn receive_at_most(max_bytes: u64, mut stream: impl Read) -> io::Result<(u8, Vec<u8>)> {
    let (kind, len) = receive_head(&mut stream)?;
    if len > max_bytes {
        return Err(io::Error::other("a message of a different protocol"));
    }
    let mut bytes = vec![0; len as usize];
    stream.read_exact(&mut bytes)?;
    Ok((kind, bytes))
}

/// Reads the kind of the next message and the length of its content.
pub(crate) fn receive_head(mut stream: impl Read) -> io::Result<(u8, u64)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head)?;
    let [kind, len @ ..] = head;
    Ok((kind, u64::from_le_bytes(len)))
}

/// Sends numbers as one message of any length: the receiver knows how many to expect, so [`MAX_BYTES`] does not apply.
pub(crate) fn send_numbers(mut stream: &TcpStream, kind: u8, values: &[f32]) -> io::Result<()> {
    stream.write_all(&head(kind, 4 * values.len()))?;
    let mut bytes = Vec::with_capacity(4 * CHUNK);
    for chunk in values.chunks(CHUNK) {
        bytes.clear();
        chunk.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        stream.write_all(&bytes)?;
    }
    Ok(())
}

/// Reads as many numbers as `values` has, and applies `update` to each value and the number read for it. The caller has
/// read kind and length with [`receive_head`].
pub(crate) fn receive_numbers(mut stream: &TcpStream, values: &mut [f32], update: fn(&mut f32, f32)) -> io::Result<()> {
    let mut bytes = vec![0; 4 * CHUNK.min(values.len())];
    for chunk in values.chunks_mut(CHUNK) {
        let bytes = &mut bytes[..4 * chunk.len()];
        stream.read_exact(bytes)?;
        for (value, bytes) in chunk.iter_mut().zip(bytes.as_chunks().0) {
            update(value, f32::from_le_bytes(*bytes));
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
        assert!(error.starts_with("a message of 1073741825 bytes, more than 1073741824"), "{error}");
    }
}
