//! Kept blocks of all layers and heads as one grey PNG.

use sieve_select::SparseMask;

/// Pixels of one head's side, at most.
const SIDE: usize = 96;
/// Pixels between heads.
const GAP: usize = 4;
/// Grey of what lies after the diagonal, and between heads.
const OUTSIDE: u8 = 200;

/// A row of heads per layer; black is kept, white is dropped. Rows and columns are tiles (with permutations, of the
/// permuted sequence); a pixel that stands for several tiles shows their mean.
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

/// An 8-bit grey PNG.
pub(in crate::eval) fn encode(width: usize, height: usize, pixels: &[u8]) -> Vec<u8> {
    let mut png = Vec::new();
    let mut encoder = png::Encoder::new(&mut png, width as u32, height as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.set_depth(png::BitDepth::Eight);
    let written = encoder
        .write_header()
        .and_then(|mut writer| writer.write_image_data(pixels));
    written.expect("memory takes a picture of at least one gap");
    png
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_select::CallShape;

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
        assert_eq!(cells(&mask, 1, 4), [0, o, o, o, 0, 0, o, o, 0, 0, 0, o, 0, 0, 0, 0]);
        let encoded = png(&[mask.clone(), mask]);
        let decoder = png::Decoder::new(encoded.as_slice());
        let (frame, mut reader) = decoder.read_info().expect("a header");
        assert_eq!((frame.width, frame.height), (20, 20));
        let mut pixels = vec![0; 20 * 20];
        reader.next_frame(&mut pixels).expect("a picture");
        // The second head of the second layer: two tiles a pixel row, after three gaps and its neighbour.
        let row = |y: usize| &pixels[y * 20 + 12..y * 20 + 16];
        assert_eq!([row(12), row(15)], [[0, o, o, o], [0, 0, 0, 0]]);
    }
}
