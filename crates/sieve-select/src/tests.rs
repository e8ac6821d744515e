//! Tests of all methods. `cargo test bfla` runs those of one method: checks of its own are named `bfla_…`, those that
//! hold for all methods run as `bfla::…`.

mod brute_force;
mod chunks;
mod corrected;
mod decode;
mod extremes;
mod forms;
mod golden;
mod methods;
mod permuted;
mod recall;
mod settings;
mod trained;

use crate::selector::Selector;
use crate::test_data::TestCall;

/// Every prefill method in settings small enough for a few hundred tokens.
pub(super) const SMALL: &[&str] = &[
    "bfla:block=32,group=8,tile=8,local_tokens=16,keep_mass=0.7",
    "bfla:block=32,group=8,tile=8,local_tokens=0,keep_mass=0.3,stride=5,prob=0.1,gqa=per_query",
    "bfla:block=16,pooling=maxabs,group=8,tile=16,local_tokens=8,keep_mass=0.5,gqa=mean",
    "bfla:block=16,pooling=mean,group=8,tile=8,local_tokens=8,keep_mass=0.3,prob=0.1,hash=linear",
    "bfla:block=16,pooling=center,group=8,tile=8,local_tokens=8,keep_mass=0.3,stride=7,rescue_grid=block",
    "momo:gamma=4,beta=8,chi=16,k=3,k_exact=1,first_dense_layers=0",
    "momo:gamma=32,beta=16,chi=16,k=2,k_exact=1,topk=tree,first_dense_layers=0,gqa=union,score=normalised",
    "delta:base=streamingllm,base.n_local=16,base.min_prefill_tokens=0,gamma=8,dense_tail=false",
    "delta:base=meanpool,base.block=16,base.tau=0.3,base.min_prefill_tokens=0,gamma=16,mode=recompute",
    "ba_att:block=16,segment=32",
    "ba_att:block=16,segment=32,sort=k,compensation=variance,compensate_layers=all,gqa=mean,sparsity=0.7",
    "pbs:block=16,segment=32,tau=0.5",
    "pbs:block=16,segment=32,tau=0.5,select=xattention,stride=4,gqa=union",
    "pbs:block=16,segment=32,tau=0.5,permute=queries",
    "pbs:block=16,segment=32,tau=0.5,permute=none,gqa=mean",
    "pbs:block=16,segment=32,tau=0.5,permute=both,order=queries_first,perm=query",
    "xattention:block=16,stride=4,tau=0.5",
    "xattention:block=16,stride=4,tau=0.5,mode=random,gqa=mean",
    "xattention:block=16,stride=8,tau=0.4,mode=slash,norm=0.5,gqa=union",
    "vertical_slash:vertical=30,slash=50",
    "vertical_slash:vertical=40,slash=50,gqa=union",
    "block_sparse:block=16,topk=2",
    "a_shape:n_init=5,n_local=20",
    "tri_shape:n_init=5,n_local=20,n_last=30",
    "flexprefill:block=16,min_budget=16,gamma=0.5",
    "flexprefill:block=16,min_budget=16,gamma=0.5,tau=1,gqa=union",
    "meanpool:block=16,tau=0.5",
    "meanpool:block=16,top_k=2,gqa=mean,last_dense_rows=20",
    "streamingllm:n_init=3,n_local=20",
    "infinitehip:block=8,stride_1=2,chunk_1=16,budget_2=64,stride_2=2,chunk_2=8,budget_3=32,chunk_3=4,budget=16,\
     sink=8,window=16,prefill_dense_below=0,first_dense_layers=0",
    "oracle_topk:block=8,k=3",
    "minference",
];

/// The same methods with everything kept.
pub(super) const EVERYTHING: &[&str] = &[
    "bfla:keep_mass=1,block=32,group=8,tile=8",
    "bfla:keep_mass=0,local_tokens=0,stride=1,block=32,group=8,tile=8",
    "momo:gamma=4,beta=8,chi=16,k=1000,first_dense_layers=0",
    "delta:base=meanpool,base.tau=1,base.block=16,gamma=8,dense_tail=false",
    "delta:base=streamingllm,gamma=1,base.n_local=1,dense_tail=false",
    "ba_att:sparsity=0,block=16,segment=32",
    "pbs:tau=1,block=16,segment=32",
    "pbs:tau=1,block=16,segment=32,permute=both,select=xattention,stride=4",
    "pbs:tau=1,block=16,segment=32,permute=queries",
    "xattention:tau=1,block=16,stride=4",
    "vertical_slash:vertical=30,slash=100000",
    "block_sparse:block=16,topk=1000",
    "a_shape:n_init=5,n_local=100000",
    "tri_shape:n_last=100000,n_local=3",
    "flexprefill:block=16,gamma=1,min_budget=16,tau=1",
    "flexprefill:block=16,gamma=1,min_budget=16,tau=0",
    "meanpool:tau=1,block=16",
    "meanpool:top_k=1000,block=16",
    "streamingllm:n_local=100000",
    "infinitehip:budget=100000,budget_2=100000,budget_3=100000,window=8,sink=8,prefill_dense_below=0,\
     first_dense_layers=0",
    "oracle_topk:k=1000,block=8",
    "oracle_topk:tau=1,block=8",
    "minference",
];

/// Those of some texts that are of one method.
fn of<'t>(texts: &[&'t str], method: &str) -> Vec<&'t str> {
    let texts = texts.iter().copied();
    let mine: Vec<&str> = texts
        .filter(|text| text.split(':').next() == Some(method))
        .collect();
    assert!(!mine.is_empty(), "{method} has no settings here");
    mine
}

/// Every check that holds for all prefill methods, as `METHOD::CHECK`.
macro_rules! prefill_methods {
    ($($method:ident)*) => {$(
        mod $method {
            use super::{EVERYTHING, SMALL, chunks, extremes, forms, of};

            const NAME: &str = stringify!($method);

            #[test]
            fn equals_dense_attention_under_its_mask() {
                forms::equals_dense_attention_under_its_mask(&of(SMALL, NAME));
            }

            #[test]
            fn everything_kept_equals_dense() {
                forms::everything_kept_equals_dense(&of(EVERYTHING, NAME));
            }

            #[test]
            fn is_sparse_and_its_density_is_that_of_the_expanded_mask() {
                forms::is_sparse_and_its_density_is_that_of_the_expanded_mask(&of(SMALL, NAME));
            }

            #[test]
            fn the_list_fixed_later_tokens_change_nothing_before() {
                forms::the_list_fixed_later_tokens_change_nothing_before(&of(SMALL, NAME));
            }

            #[test]
            fn order_of_heads_and_requests_changes_nothing_but_rounding() {
                forms::order_of_heads_and_requests_changes_nothing_but_rounding(&of(SMALL, NAME));
            }

            #[test]
            fn threads_do_not_change_a_bit() {
                forms::threads_do_not_change_a_bit(&of(SMALL, NAME));
            }

            #[test]
            fn batches_of_different_lengths_with_an_empty_document_between() {
                forms::batches_of_different_lengths_with_an_empty_document_between(&of(SMALL, NAME));
            }

            #[test]
            fn equal_scores_zeros_and_a_huge_key() {
                extremes::equal_scores_zeros_and_a_huge_key(&of(SMALL, NAME));
            }

            #[test]
            fn one_finite_score_takes_everything() {
                extremes::one_finite_score_takes_everything(&of(SMALL, NAME));
            }

            #[test]
            fn a_nan_makes_its_head_dense_and_leaves_the_others_alone() {
                extremes::a_nan_makes_its_head_dense_and_leaves_the_others_alone(&of(SMALL, NAME));
            }

            #[test]
            fn chunks_agree_as_far_as_promised() {
                chunks::chunks_agree_as_far_as_promised(NAME);
            }

            #[test]
            fn misaligned_chunks_are_valid_and_equal_their_oracle() {
                chunks::misaligned_chunks_are_valid_and_equal_their_oracle(&of(SMALL, NAME));
            }

            #[test]
            fn everything_kept_in_misaligned_chunks_equals_dense() {
                chunks::everything_kept_in_misaligned_chunks_equals_dense(&of(EVERYTHING, NAME));
            }
        }
    )*};
}

prefill_methods! {
    bfla momo delta ba_att pbs xattention minference vertical_slash block_sparse a_shape tri_shape flexprefill meanpool
    streamingllm infinitehip oracle_topk
}

#[test]
fn every_prefill_method_is_checked() {
    let tested: std::collections::BTreeSet<&str> = SMALL
        .iter()
        .filter_map(|text| text.split(':').next())
        .collect();
    let known: std::collections::BTreeSet<&str> =
        crate::names_of(crate::Phase::Prefill).into_iter().collect();
    assert_eq!(tested, known);
}

/// A selector from its text, without the shortcut for short calls.
pub(super) fn selector(text: &str) -> Selector {
    let mut selector = Selector::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    selector.common.min_prefill_tokens = 0;
    selector
}

/// The mask of a method on a call.
pub(super) fn select(text: &str, data: &TestCall) -> crate::SparseMask {
    let call = data.call();
    let mask = selector(text)
        .select(&call)
        .unwrap_or_else(|error| panic!("{text}: {error}"));
    mask.check(&call)
        .unwrap_or_else(|error| panic!("{text}: {error}"));
    mask
}
