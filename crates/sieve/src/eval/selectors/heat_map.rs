//! An SVG of the key tiles that a prefill selector keeps, by layer and head.
use crate::draw::heads::{Heads, Legend, Square};
use sieve_select::{KeyMask, Selected};

/// Pixels of one head's side, at most.
const SIDE: usize = 1024;
/// Grey level of keys after the query.
const LATER: u8 = 200;

/// The SVG's text: a row of heads for each layer. Black tiles are kept, white ones dropped. A method that permutes
/// tokens is drawn in the permuted order. A pixel that covers several tiles shows their mean.
pub(super) fn svg(label: &str, model: &str, chosen: &[Selected]) -> String {
    let masks: Vec<&KeyMask> = chosen.iter().map(|one| &one.mask).collect();
    let num_tokens = masks.first().map_or(0, |mask| mask.shape.num_queries);
    let square = |mask: &KeyMask, head| {
        let side = mask.tiles.num_query_tiles().clamp(1, SIDE);
        Square { side, pixels: cells(mask, head, side) }
    };
    let layer = |(layer, mask): (usize, &&KeyMask)| {
        let heads = (0..mask.shape.num_heads).map(|head| square(mask, head));
        (layer, heads.collect())
    };
    let picture = Heads {
        title: format!("Kept blocks of {label}"),
        about: format!("{model}; a prompt of {num_tokens} tokens, in the permuted order where tokens are permuted"),
        num_tokens,
        layers: masks.iter().enumerate().map(layer).collect(),
        legend: Legend::Boxes(&[(0, "kept"), (255, "dropped"), (LATER, "after the query")]),
    };
    picture.svg()
}

/// Grey values of one head, `[size, size]`.
fn cells(mask: &KeyMask, head: usize, size: usize) -> Vec<u8> {
    let tiles = mask.tiles;
    let (rows, columns) = (tiles.num_query_tiles(), tiles.num_key_tiles());
    let mut kept = vec![0_u32; size * size];
    let mut all = vec![0_u32; size * size];
    for i in 0..rows {
        let row = mask.row(mask.list_of(head), i);
        let last = row.last().map_or(0, |&j| j as usize + 1);
        // Counts the tiles up to the query's own, and any later ones that are kept.
        for j in 0..tiles.admissible(i).max(last).min(columns) {
            let at = i * size / rows * size + j * size / columns;
            all[at] += 1;
            kept[at] += u32::from(row.binary_search(&(j as i32)).is_ok());
        }
    }
    let grey = |(&kept, &all): (&u32, &u32)| match all {
        0 => LATER,
        _ => 255 - (255 * kept / all) as u8,
    };
    kept.iter().zip(&all).map(grey).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_select::CallShape;

    #[test]
    fn a_dense_head_is_a_black_triangle() {
        let shape = CallShape::new([512; 2], [2, 1], 4);
        let chosen = Selected::dense(shape);
        let o = LATER;
        assert_eq!(cells(&chosen.mask, 1, 4), [0, o, o, o, 0, 0, o, o, 0, 0, 0, o, 0, 0, 0, 0]);
        let svg = svg("a<b", "run, step 3", &[chosen.clone(), chosen]);
        assert_eq!(svg.matches("<image").count(), 4);
        for words in [">Kept blocks of a&lt;b<", "512 tokens", ">layer 1<", ">head 1<", ">512<", ">dropped<"] {
            assert!(svg.contains(words), "{words}");
        }
    }
}
