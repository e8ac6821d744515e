//! Rows of attention under selectors' masks, beside dense attention.
use crate::device::upload_mask;
use crate::error::Result;
use crate::shape::prompt_shape;
use crate::timed::{Bench, NO_BIAS, NO_WINDOW, Work, forward_flops, shape};
use sieve_core::{KeyMask, Tiles};
use sieve_kernels::AttentionShape;
use sieve_testing::Random;

/// Times attention of 32 query heads over 8 KV heads of width 128 under random masks, one list for each query head.
pub(crate) fn rows(bench: &mut Bench<'_>) -> Result<()> {
    for seq_len in [32_768, 131_072] {
        let shape = shape(1, seq_len, [32, 8], 128);
        let Some(inputs) = bench.inputs_or_skip(shape)? else {
            continue;
        };
        let dense = |bench: &mut Bench<'_>, name: &str| {
            let work = Work::Flops(forward_flops(shape, seq_len));
            bench.row(name, shape, work, || inputs.forward(NO_WINDOW, NO_BIAS));
        };
        dense(bench, "dense forward");
        for (tile, density) in [(128, 1.0), (128, 0.125), (128, 0.0625), (64, 0.125)] {
            let (mask, pairs) = mask(shape, tile, density);
            let mask = upload_mask(&bench.device, &mask).expect("every tile is inside the sequence");
            let work = Work::Flops(4.0 * shape.head_dim as f64 * pairs);
            let name = format!("sparse forward, tiles of {tile}, density {density}");
            bench.row(&name, shape, work, || inputs.qkv.sparse_attention_forward(&mask, inputs.scale));
            // Dense attention a second time: a GPU at its power limit is slower in later rows.
            if density == 1.0 {
                dense(bench, "dense forward, again");
            }
        }
    }
    Ok(())
}

/// A mask that keeps the diagonal tile and random earlier tiles of each row, a share `density` of the causal tiles; and
/// the number of pairs of query and key that it keeps.
fn mask(shape: AttentionShape, tile: usize, density: f64) -> (KeyMask, f64) {
    let call = prompt_shape(&shape);
    let tiles = Tiles::new(call, tile, tile);
    let mut random = Random(5);
    let mut row = |i: usize| -> [Vec<i32>; 2] {
        let wanted = ((density * (i + 1) as f64).round() as usize).max(1);
        // Knuth's algorithm S: draws exactly `wanted - 1` of the i earlier tiles, each with the same probability.
        let mut left = wanted - 1;
        let mut kept = vec![i as i32];
        for j in 0..i {
            if random.below(i - j) < left {
                kept.push(j as i32);
                left -= 1;
            }
        }
        [kept, Vec::new()]
    };
    let places = (0..shape.num_heads).flat_map(|_| 0..tiles.num_query_tiles());
    let heads_per_list = 1;
    let mask = KeyMask::new(call, tiles, heads_per_list, places.map(&mut row));
    // Half of a diagonal tile's pairs are causal.
    let diagonal = (shape.num_heads * tiles.num_query_tiles()) as f64;
    let pairs = (mask.num_tiles() as f64 - diagonal / 2.0) * (tile * tile) as f64;
    (mask, pairs)
}
