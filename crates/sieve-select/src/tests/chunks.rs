//! Chunked prefill: the same lists where a method promises it, a valid and causal result everywhere.

use super::{EVERYTHING, SMALL, select, selector};
use crate::mask::SparseMask;
use crate::test_data::{Random, TestCall, assert_close};
use crate::{oracle_attention, oracle_dense};

/// Methods whose lists do not depend on how a prompt is cut, and a chunk they agree for.
const SAME: &[(&str, usize)] = &[
    (
        "bfla:block=32,group=8,tile=8,local_tokens=16,keep_mass=0.6,stride=7,prob=0.1",
        32,
    ),
    (
        "momo:gamma=4,beta=8,chi=16,k=3,k_exact=1,first_dense_layers=0",
        16,
    ),
    ("xattention:block=16,stride=4,tau=0.5", 16),
    ("meanpool:block=16,tau=0.5", 16),
    ("block_sparse:block=16,topk=2", 16),
    ("oracle_topk:block=8,k=3", 8),
    (
        "infinitehip:block=8,stride_1=2,chunk_1=16,budget_2=64,stride_2=2,chunk_2=8,budget_3=32,chunk_3=4,budget=16,sink=8,window=16,\
         prefill_dense_below=0,first_dense_layers=0",
        8,
    ),
];

/// Tiles per (list, query tile of the whole call).
fn rows(mask: &SparseMask) -> Vec<Vec<Vec<i32>>> {
    (0..mask.num_lists())
        .map(|list| {
            (0..mask.tiles.num_query_tiles())
                .map(|i| mask.row(list, i).to_vec())
                .collect()
        })
        .collect()
}

#[test]
fn chunks_of_a_multiple_of_the_blocks_give_the_same_lists() {
    let data = TestCall::structured(&mut Random(71), 275, [4, 2], 16);
    for &(text, step) in SAME {
        let whole = rows(&select(text, &data));
        for chunk in [step, 3 * step] {
            let mut joined: Vec<Vec<Vec<i32>>> = vec![Vec::new(); whole.len()];
            for first in (0..275).step_by(chunk) {
                let part = rows(&select(text, &data.chunk(first, (first + chunk).min(275))));
                joined
                    .iter_mut()
                    .zip(part)
                    .for_each(|(all, part)| all.extend(part));
            }
            assert_eq!(joined, whole, "{text}, chunks of {chunk}");
        }
    }
}

#[test]
fn ranges_agree_for_chunks_of_any_size() {
    let data = TestCall::random(&mut Random(72), 275, 275, [2, 1], 16);
    for text in [
        "a_shape:n_init=5,n_local=20",
        "streamingllm:n_init=3,n_local=20",
    ] {
        let whole = select(text, &data);
        for first in (0..275).step_by(100) {
            let end = (first + 100).min(275);
            let part = select(text, &data.chunk(first, end));
            for row in first..end {
                let in_part = crate::oracle::expanded_row(&part, 1, row - first);
                assert_eq!(
                    in_part[..],
                    crate::oracle::expanded_row(&whole, 1, row)[..end],
                    "{text}, row {row}"
                );
            }
        }
    }
}

#[test]
fn misaligned_chunks_are_valid_and_equal_their_oracle() {
    let data = TestCall::structured(&mut Random(73), 275, [4, 2], 16);
    for text in SMALL {
        for (first, end) in [(0, 100), (100, 200), (200, 275), (123, 124)] {
            let part = data.chunk(first, end);
            let call = part.call();
            let mask = select(text, &part);
            let output = crate::block_sparse_attention(&call, &mask)
                .unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_close(text, &output.o, &oracle_attention(&call, &mask).o, 2e-5);
        }
    }
}

#[test]
fn everything_kept_in_misaligned_chunks_equals_dense() {
    let data = TestCall::random(&mut Random(74), 275, 275, [4, 2], 16);
    let whole = oracle_dense(&data.call());
    for text in EVERYTHING {
        for (first, end) in [(0, 100), (100, 200), (200, 275)] {
            let part = data.chunk(first, end);
            let done = selector(text)
                .prefill(&part.call())
                .unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_close(text, &done.output.o, &whole.o[first * 64..end * 64], 2e-5);
        }
    }
}
