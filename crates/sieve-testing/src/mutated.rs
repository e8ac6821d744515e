//! Damaged files for fuzz tests: a reader must accept or refuse them, and never panic.

use crate::Random;

/// Texts that a mutation inserts. The first [`NUM_NUMBER_TEXTS`] are or resemble numbers.
const TEXTS: [&str; 25] = [
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

/// How many of [`TEXTS`] replace a number.
const NUM_NUMBER_TEXTS: usize = 7;

/// Integers at the ends of ranges, where sizes and offsets overflow.
const NUMBERS: [u64; 8] = [0, 1, u64::MAX, i64::MAX as u64, u32::MAX as u64, i32::MAX as u64, 1 << 31, 1 << 62];

/// A copy of `bytes` with one to four random changes in its first `within` bytes; `number` is the seed.
pub fn mutated(bytes: &[u8], within: usize, number: u64) -> Vec<u8> {
    let mut random = Random(number.wrapping_mul(0x9e37_79b9) ^ bytes.len() as u64);
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(4) {
        let len = bytes.len().min(within);
        if len == 0 {
            break;
        }
        let at = random.below(len);
        let range = at..(at + 1 + random.below(16)).min(len);
        let text = TEXTS[random.below(TEXTS.len())].bytes();
        match random.below(10) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.bits() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(range)),
            4 => {
                let (copy, to) = (bytes[range].to_vec(), random.below(len));
                bytes.splice(to..to, copy);
            }
            5 => drop(bytes.splice(at..at, text)),
            6 => drop(bytes.splice(range, text)),
            // Replaces a random whole number.
            7 => {
                let is_start = |&at: &usize| bytes[at].is_ascii_digit() && (at == 0 || !bytes[at - 1].is_ascii_digit());
                let starts: Vec<usize> = (0..len).filter(is_start).collect();
                if !starts.is_empty() {
                    let start = starts[random.below(starts.len())];
                    let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit());
                    let end = start + digits.count();
                    bytes.splice(start..end, TEXTS[random.below(NUM_NUMBER_TEXTS)].bytes());
                }
            }
            // Overwrites bytes with an integer.
            8 => {
                let number = random.one_of(&NUMBERS).to_le_bytes();
                let width = random.one_of(&[1, 4, 8]);
                bytes[at..].iter_mut().zip(&number[..width]).for_each(|(byte, &new)| *byte = new);
            }
            // Removes a line.
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
