//! Recall on queries and keys of trained models: no method beats the oracle on the same blocks, and every method beats
//! chance.

use std::cell::RefCell;

use super::recall::{measured, recall_of};
use super::select;
use crate::KeyMask;
use crate::mask::{Selected, key_of};
use crate::pool::causal_probabilities;
use crate::test_data::TestCall;
use sieve_testing::Random;

const TOKENS: usize = 512;

/// Methods that choose among blocks of 32 keys for 32 queries, each head for itself.
const SAME_BLOCKS: [&str; 9] = [
    "meanpool:block=32,tau=0.7",
    "meanpool:block=32,top_k=5",
    "xattention:block=32,stride=8,tau=0.7",
    "block_sparse:block=32,topk=5",
    "flexprefill:block=32,min_budget=64,gamma=0.7",
    "bfla:block=32,group=8,tile=32,local_tokens=32,keep_mass=0.9,gqa=per_query",
    "momo:gamma=8,beta=32,chi=32,k=4,k_exact=1,first_dense_layers=0,mode=sparse_only",
    "pbs:block=32,segment=64,tau=0.7",
    "ba_att:block=32,segment=64,sort=k,sparsity=0.6",
];

/// One layer of each of two models, with groups of 2 and of 8.
fn trained() -> [TestCall; 2] {
    ["trained.4.2", "trained.8.1"].map(|name| TestCall::stored(name).part(0..TOKENS))
}

/// A mask with as many tiles in every row as `chosen` has, and its order of keys: the tiles with the row's own keys,
/// then the first others in the order that `order` makes of the tiles' dense masses.
fn as_many_tiles(data: &TestCall, chosen: &Selected, order: &dyn Fn(&[f32]) -> Vec<usize>) -> Selected {
    let (call, tiles) = (data.call(), chosen.mask.tiles);
    let rows = (0..chosen.mask.num_lists()).flat_map(|list| {
        let head = chosen.mask.heads_of(list).start;
        let rows = (0..tiles.num_query_tiles()).map(|i| {
            let end = tiles.last(i) + 1;
            let p = causal_probabilities(&call, head, tiles.rows(i)).expect("finite");
            let mass = |j: usize| -> f32 {
                let slots = tiles.keys(j);
                let keys = slots.map(|slot| key_of(&chosen.mask, list, slot));
                keys.filter(|&key| key < end).map(|key| p.chunks_exact(end).map(|row| row[key]).sum::<f32>()).sum()
            };
            let masses: Vec<f32> = (0..tiles.num_key_tiles()).map(mass).collect();
            // Every mask must keep the tiles with a row's own keys, also where keys are permuted. These tiles count
            // too.
            let own: Vec<i32> = chosen
                .mask
                .row(list, i)
                .iter()
                .copied()
                .filter(|&j| holds_an_own_key(chosen, list, i, j as usize))
                .collect();
            let mut row = own.clone();
            let order = order(&masses).into_iter().map(|j| j as i32);
            row.extend(order.filter(|j| !own.contains(j)).take(chosen.mask.row(list, i).len() - own.len()));
            [row, Vec::new()]
        });
        rows.collect::<Vec<_>>()
    });
    let mut other = KeyMask::new(chosen.mask.shape, tiles, chosen.mask.heads_per_list, rows);
    other.set_key_order(chosen.mask.key_order());
    other.into()
}

/// Whether key tile `j` has the key at the position of a row of query tile `i`.
fn holds_an_own_key(chosen: &Selected, list: usize, i: usize, j: usize) -> bool {
    let positions = chosen.mask.tiles.first(i)..chosen.mask.tiles.last(i) + 1;
    let mut slots = chosen.mask.tiles.keys(j);
    slots.any(|slot| positions.contains(&key_of(&chosen.mask, list, slot)))
}

#[test]
fn oracle_on_the_tiles_of_a_method_keeps_at_least_as_much() {
    for data in trained() {
        for text in SAME_BLOCKS {
            let mut chosen = select(text, &data);
            chosen.correction = None;
            let (kept, best) =
                (recall_of(&data, &chosen), recall_of(&data, &as_many_tiles(&data, &chosen, &crate::keep::falling)));
            assert!(best >= kept - 1e-6, "{text}: {kept}, oracle {best}");
            assert!(kept > 0.3, "{text}: {kept}");
        }
    }
}

#[test]
fn oracle_topk_bounds_the_methods_on_its_blocks_at_equal_density() {
    for data in trained() {
        // The oracle keeps a number of blocks in each row, or a mass, which gives some rows more blocks than others.
        let forms: [Vec<(f64, f64)>; 2] = [
            (1..=16).map(|k| measured(&format!("oracle_topk:block=32,k={k}"), &data)).collect(),
            (1..=50)
                .map(|t| {
                    let tau = f64::from(t) / 50.0;
                    measured(&format!("oracle_topk:block=32,tau={tau}"), &data)
                })
                .collect(),
        ];
        for text in &SAME_BLOCKS[..7] {
            let (density, kept) = measured(text, &data);
            let best = forms
                .iter()
                .filter_map(|form| form.iter().find(|oracle| oracle.0 >= density))
                .map(|oracle| oracle.1)
                .fold(0.0, f64::max);
            assert!(best >= kept - 1e-6, "{text}: {kept} at {density}, oracle {best}");
        }
    }
}

/// Over both models, every method keeps more dense mass than the same number of tiles drawn at random among the tiles
/// with visible keys.
#[test]
fn every_method_keeps_more_mass_than_as_many_random_tiles() {
    for text in SAME_BLOCKS {
        let [mut kept, mut drawn] = [0.0; 2];
        for data in trained() {
            let mut chosen = select(text, &data);
            chosen.correction = None;
            let random = RefCell::new(Random(7));
            let blindly = |masses: &[f32]| {
                let mut random = random.borrow_mut();
                let visible = (0..masses.len()).filter(|&j| masses[j] > 0.0);
                let mut drawn: Vec<(u64, usize)> = visible.map(|j| (random.bits(), j)).collect();
                drawn.sort_unstable();
                drawn.into_iter().map(|(_, j)| j).collect()
            };
            let blind = as_many_tiles(&data, &chosen, &blindly);
            assert_eq!(blind.mask.num_tiles(), chosen.mask.num_tiles(), "{text}");
            kept += recall_of(&data, &chosen) / 2.0;
            drawn += recall_of(&data, &blind) / 2.0;
        }
        assert!(kept > drawn + 0.02, "{text}: {kept}, drawn blindly {drawn}");
    }
}
