//! Damaged files: what readers must take as it stands, or refuse.

use crate::Random;

/// What a number, a word or a sign may become; whole numbers first.
const PIECES: [&str; 25] = [
    "0",
    "-1",
    "1e400",
    "nan",
    "18446744073709551615",
    "9223372036854775808",
    "0.5",
    "\"",
    "'",
    "[",
    "]",
    "{",
    "}",
    "=",
    ":",
    ",",
    "\n",
    "\\u0000",
    "\\",
    "null",
    "true",
    "[[[[",
    "\u{7f}",
    "é",
    "\0",
];

/// Ends of ranges, where sizes and offsets overflow.
const NUMBERS: [u64; 8] = [
    0,
    1,
    u64::MAX,
    i64::MAX as u64,
    u32::MAX as u64,
    i32::MAX as u64,
    1 << 31,
    1 << 62,
];

/// `bytes` with one to four changes in the first `within` of them, fixed by `number`.
pub fn mutated(bytes: &[u8], within: usize, number: u64) -> Vec<u8> {
    let mut random = Random(number.wrapping_mul(0x9e37_79b9) ^ bytes.len() as u64);
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let len = bytes.len().min(within);
        if len == 0 {
            break;
        }
        let at = random.below(len);
        let piece = at..(at + 1 + random.below(16)).min(len);
        let word = PIECES[random.below(PIECES.len())].bytes();
        match random.below(10) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.bits() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(piece)),
            4 => {
                let (copy, to) = (bytes[piece].to_vec(), random.below(len));
                bytes.splice(to..to, copy);
            }
            5 => drop(bytes.splice(at..at, word)),
            6 => drop(bytes.splice(piece, word)),
            // A whole number for another.
            7 => {
                let is_start = |&at: &usize| bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_digit());
                let starts: Vec<usize> = (0..len).filter(is_start).collect();
                if !starts.is_empty() {
                    let start = starts[random.below(starts.len())];
                    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit());
                    let end = start + digits.count();
                    bytes.splice(start..end, PIECES[random.below(7)].bytes());
                }
            }
            8 => {
                let number = random.one_of(&NUMBERS).to_le_bytes();
                let width = random.one_of(&[1, 4, 8]);
                bytes[at..]
                    .iter_mut()
                    .zip(&number[..width])
                    .for_each(|(byte, &new)| *byte = new);
            }
            // A line less.
            _ => {
                let line = |byte: &u8| *byte == b'\n';
                let start = bytes[..at].iter().rposition(line).map_or(0, |end| end + 1);
                let end = bytes[at..].iter().position(line).map_or(len, |end| at + end + 1);
                bytes.drain(start..end);
            }
        }
    }
    bytes
}
