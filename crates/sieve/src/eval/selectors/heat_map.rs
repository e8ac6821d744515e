//! Kept blocks of all layers and heads as one grey PNG.

use sieve_select::SparseMask;

/// Pixels of one head's side, at most.
const SIDE: usize = 96;
/// Pixels between heads.
const GAP: usize = 4;
/// Grey of what lies after the diagonal, and between heads.
const OUTSIDE: u8 = 200;

/// A row of heads per layer; black is kept, white is dropped. Rows and columns are tiles (with permutations, of the permuted
/// sequence); a pixel that stands for several tiles shows their mean.
pub(super) fn png(masks: &[SparseMask]) -> Vec<u8> {
    let side = |mask: &SparseMask| mask.tiles.num_query_tiles().clamp(1, SIDE);
    let heads = masks.first().map_or(0, |mask| mask.shape.num_heads);
    let cell = masks.iter().map(side).max().unwrap_or(1) + GAP;
    let (width, height) = (heads * cell + GAP, masks.len() * cell + GAP);
    let mut pixels = vec![OUTSIDE; width * height];
    for (layer, mask) in masks.iter().enumerate() {
        for head in 0..heads {
            let size = side(mask);
            for (y, row) in cells(mask, head, size).chunks(size).enumerate() {
                let at = (GAP + layer * cell + y) * width + GAP + head * cell;
                pixels[at..at + size].copy_from_slice(row);
            }
        }
    }
    encode(width, height, &pixels)
}

/// Grey values of one head, `[size, size]`.
fn cells(mask: &SparseMask, head: usize, size: usize) -> Vec<u8> {
    let tiles = mask.tiles;
    let (rows, columns) = (tiles.num_query_tiles(), tiles.num_key_tiles());
    let mut kept = vec![0_u32; size * size];
    let mut all = vec![0_u32; size * size];
    for i in 0..rows {
        let row = mask.row(mask.list_of(head), i);
        let last = row.last().map_or(0, |&j| j as usize + 1);
        for j in 0..tiles.admissible(i).max(last).min(columns) {
            let at = i * size / rows * size + j * size / columns;
            all[at] += 1;
            kept[at] += u32::from(row.binary_search(&(j as i32)).is_ok());
        }
    }
    let grey = |(&kept, &all): (&u32, &u32)| match all {
        0 => OUTSIDE,
        _ => 255 - (255 * kept / all) as u8,
    };
    kept.iter().zip(&all).map(grey).collect()
}

/// An 8-bit grey PNG, its data stored without compression.
pub(in crate::eval) fn encode(width: usize, height: usize, pixels: &[u8]) -> Vec<u8> {
    let mut raw = Vec::with_capacity(pixels.len() + height);
    for row in pixels.chunks(width.max(1)) {
        raw.push(0);
        raw.extend_from_slice(row);
    }
    // A zlib stream of stored blocks.
    let mut data = vec![0x78, 0x01];
    let blocks: Vec<&[u8]> = raw.chunks(0xffff).collect();
    for (index, block) in blocks.iter().enumerate() {
        data.push(u8::from(index + 1 == blocks.len()));
        data.extend_from_slice(&(block.len() as u16).to_le_bytes());
        data.extend_from_slice(&(!(block.len() as u16)).to_le_bytes());
        data.extend_from_slice(block);
    }
    data.extend_from_slice(&adler32(&raw).to_be_bytes());
    let mut header = Vec::new();
    header.extend_from_slice(&(width as u32).to_be_bytes());
    header.extend_from_slice(&(height as u32).to_be_bytes());
    header.extend_from_slice(&[8, 0, 0, 0, 0]);
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut png, b"IHDR", &header);
    chunk(&mut png, b"IDAT", &data);
    chunk(&mut png, b"IEND", &[]);
    png
}

fn chunk(png: &mut Vec<u8>, name: &[u8; 4], data: &[u8]) {
    png.extend_from_slice(&(data.len() as u32).to_be_bytes());
    let start = png.len();
    png.extend_from_slice(name);
    png.extend_from_slice(data);
    let crc = crc32(&png[start..]);
    png.extend_from_slice(&crc.to_be_bytes());
}

fn adler32(data: &[u8]) -> u32 {
    let (mut a, mut b) = (1_u32, 0_u32);
    for &byte in data {
        a = (a + u32::from(byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    b << 16 | a
}

fn crc32(data: &[u8]) -> u32 {
    let mut crc = !0_u32;
    for &byte in data {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                crc >> 1 ^ 0xedb8_8320
            } else {
                crc >> 1
            };
        }
    }
    !crc
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_select::CallShape;

    #[test]
    fn checksums_are_the_known_ones() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn a_dense_head_is_a_black_triangle() {
        let shape = CallShape {
            num_queries: 512,
            num_keys: 512,
            num_heads: 2,
            num_kv_heads: 1,
            head_dim: 4,
        };
        let mask = SparseMask::dense(shape);
        let o = OUTSIDE;
        assert_eq!(
            cells(&mask, 1, 4),
            [0, o, o, o, 0, 0, o, o, 0, 0, 0, o, 0, 0, 0, 0]
        );
        let png = png(&[mask.clone(), mask]);
        assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(png[16..24], [0, 0, 0, 20, 0, 0, 0, 20]);
    }
}
