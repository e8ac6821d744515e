//! An SVG of the key tiles that a prefill selector keeps, by layer and head.
use crate::draw::heads::{Heads, Legend, Square};
use sieve_eval::LayerMask;
use sieve_select::KeyMask;

/// Pixels of one head's side, at most.
const SIDE: usize = 1024;
/// Grey level of keys after the query.
const LATER: u8 = 200;

/// The SVG's text: a row of heads for each layer. Black tiles are kept, white ones dropped. A method that permutes
/// tokens is drawn in the permuted order. A pixel that covers several tiles shows their mean. A head's notes are the
/// share of the tiles that it keeps and the share of dense attention's probability on them, the coverage in PBS's maps
/// (arXiv:2510.21270, figure 2).
pub(super) fn svg(label: &str, model: &str, chosen: &[LayerMask]) -> String {
    let num_tokens = chosen.first().map_or(0, |one| one.selected.mask.shape.num_queries);
    let square = |mask: &KeyMask, head, mass: f64| {
        let side = mask.tiles.num_query_tiles().clamp(1, SIDE);
        let notes =
            vec![format!("keeps {:.0} %", 100.0 * kept_share(mask, head)), format!("mass {:.0} %", 100.0 * mass)];
        Square { side, pixels: cells(mask, head, side), notes }
    };
    let layer = |one: &LayerMask| {
        let heads = one.mass.iter().enumerate().map(|(head, mass)| square(&one.selected.mask, head, *mass));
        (one.layer, heads.collect())
    };
    let picture = Heads {
        title: format!("Kept blocks of {label}"),
        about: format!("{model}; a prompt of {num_tokens} tokens, in the permuted order where tokens are permuted"),
        num_tokens,
        layers: chosen.iter().map(layer).collect(),
        legend: Legend::Boxes(&[(0, "kept"), (255, "dropped"), (LATER, "after the query")]),
    };
    picture.svg()
}

/// The share of one head's tiles up to the queries' own that is kept; above 1 where later tiles are kept too.
fn kept_share(mask: &KeyMask, head: usize) -> f64 {
    let (mut kept, mut all) = (0, 0);
    for i in 0..mask.tiles.num_query_tiles() {
        kept += mask.row(mask.list_of(head), i).len();
        all += mask.tiles.admissible(i);
    }
    kept as f64 / all.max(1) as f64
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
    use sieve_select::{CallShape, Selected};

    #[test]
    fn a_dense_head_is_a_black_triangle() {
        let shape = CallShape::new([512; 2], [2, 1], 4);
        let chosen = Selected::dense(shape);
        let o = LATER;
        assert_eq!(cells(&chosen.mask, 1, 4), [0, o, o, o, 0, 0, o, o, 0, 0, 0, o, 0, 0, 0, 0]);
        let layer = |layer| LayerMask { layer, selected: chosen.clone(), mass: vec![1.0, 0.874] };
        let svg = svg("a<b", "run, step 3", &[layer(2), layer(5)]);
        assert_eq!(svg.matches("<image").count(), 4);
        let words = [
            ">Kept blocks of a&lt;b<",
            "512 tokens",
            ">layer 2<",
            ">layer 5<",
            ">head 1<",
            ">512<",
            ">dropped<",
            ">keeps 100 %<",
            ">mass 100 %<",
            ">mass 87 %<",
        ];
        for words in words {
            assert!(svg.contains(words), "{words}");
        }
    }
}
