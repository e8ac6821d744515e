//! Chunked prefill: methods that promise it keep the same lists as in one call; every method's result is valid and
//! causal.

use super::{prefill, selector};
use crate::mask::Selected;
use crate::oracle_dense;
use crate::test_data::TestCall;
use sieve_testing::{Random, assert_close_relative, refusal, wide};

/// Methods that keep the same lists in chunks as in one call, and a chunk size for which they do.
const SAME: &[(&str, usize)] = &[
    ("bfla:block=32,group=8,tile=8,local_tokens=16,keep_mass=0.6,stride=7,prob=0.1", 32),
    ("momo:gamma=4,beta=8,chi=16,k=3,k_exact=1,first_dense_layers=0", 16),
    ("xattention:block=16,stride=4,tau=0.5", 16),
    ("meanpool:block=16,tau=0.5", 16),
    ("block_sparse:block=16,topk=2", 16),
    ("oracle_topk:block=8,k=3", 8),
    (
        "infinitehip:block=8,stride_1=2,chunk_1=16,budget_2=64,stride_2=2,chunk_2=8,budget_3=32,chunk_3=4,budget=16,\
         sink=8,window=16,\
         prefill_dense_below=0,first_dense_layers=0",
        8,
    ),
    // The next methods keep ranges of single tokens, so chunks of any size give the same lists.
    ("a_shape:n_init=5,n_local=20", 50),
    ("streamingllm:n_init=3,n_local=20", 25),
];

/// The kept key tiles of each list and query tile, one list after another.
fn rows(chosen: &Selected) -> Vec<Vec<Vec<i32>>> {
    (0..chosen.mask.num_lists())
        .map(|list| (0..chosen.mask.tiles.num_query_tiles()).map(|i| chosen.mask.row(list, i).to_vec()).collect())
        .collect()
}

/// A method in [`SAME`] gives the same lists and outputs in chunks as in one call. [`SAME`] has all methods that
/// promise this.
pub(super) fn chunks_agree_as_far_as_promised(method: &&str) {
    let promised = "bfla momo xattention meanpool block_sparse a_shape streamingllm infinitehip oracle_topk";
    let cases: Vec<_> = SAME.iter().filter(|(text, _)| text.split(':').next() == Some(*method)).collect();
    assert_eq!(!cases.is_empty(), promised.split(' ').any(|name| name == *method), "{method}");
    let data = TestCall::structured(&mut Random(71), 275, [4, 2], 16);
    let call = data.call();
    for &&(text, step) in &cases {
        let whole = prefill(text, &call);
        for chunk in [step, 3 * step] {
            let parts = selector(text).prefill_in_chunks(&call, chunk).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(parts.len(), 275_usize.div_ceil(chunk));
            let mut joined: Vec<Vec<Vec<i32>>> = vec![Vec::new(); whole.selected.mask.num_lists()];
            for part in &parts {
                let part = rows(&part.selected);
                joined.iter_mut().zip(part).for_each(|(all, part)| all.extend(part));
            }
            if step % whole.selected.mask.tiles.query_tile == 0 {
                assert_eq!(joined, rows(&whole.selected), "{text}, chunks of {chunk}");
            }
            let o: Vec<f32> = parts.into_iter().flat_map(|part| part.output.o).collect();
            assert_close_relative(text, &o, &wide(&whole.output.o), 1e-5);
        }
    }
}

#[test]
fn a_chunk_of_no_tokens_is_refused() {
    let data = TestCall::random(&mut Random(72), 40, 40, [2, 1], 16);
    let error = selector("meanpool").prefill_in_chunks(&data.call(), 0);
    refusal(error, "chunks of 0 tokens");
}

pub(super) fn everything_kept_in_misaligned_chunks_equals_dense(texts: &[&str]) {
    let data = TestCall::random(&mut Random(74), 275, 275, [4, 2], 16);
    let whole = oracle_dense(&data.call());
    for text in texts {
        for (first, end) in [(0, 100), (100, 200), (200, 275)] {
            let done = prefill(text, &data.call().chunk(first..end));
            assert_close_relative(text, &done.output.o, &whole.o[first * 64..end * 64], 2e-5);
        }
    }
}
