//! Tests of all methods: by method name in the files below, and across methods in `forms` and `extremes`.

mod chunks;
mod decode;
mod extremes;
mod forms;
mod golden;
mod methods;
mod recall;

use crate::selector::Selector;
use crate::test_data::TestCall;

/// Every prefill method in settings small enough for a few hundred tokens.
pub(super) const SMALL: &[&str] = &[
    "bfla:block=32,group=8,tile=8,local_tokens=16,keep_mass=0.7",
    "bfla:block=32,group=8,tile=8,local_tokens=0,keep_mass=0.3,stride=5,prob=0.1,gqa=per_query",
    "bfla:block=16,pooling=maxabs,group=8,tile=16,local_tokens=8,keep_mass=0.5,gqa=mean",
    "momo:gamma=4,beta=8,chi=16,k=3,k_exact=1,first_dense_layers=0",
    "momo:gamma=32,beta=16,chi=16,k=2,k_exact=1,topk=tree,first_dense_layers=0,gqa=union,score=normalised",
    "delta:base=streamingllm,base.n_local=16,base.min_prefill_tokens=0,gamma=8,dense_tail=false",
    "delta:base=meanpool,base.block=16,base.tau=0.3,base.min_prefill_tokens=0,gamma=16,mode=recompute",
    "ba_att:block=16,segment=32",
    "ba_att:block=16,segment=32,sort=k,compensation=variance,compensate_layers=all,gqa=mean,sparsity=0.7",
    "pbs:block=16,segment=32,tau=0.5",
    "pbs:block=16,segment=32,tau=0.5,select=xattention,stride=4,gqa=union",
    "pbs:block=16,segment=32,tau=0.5,permute=queries",
    "pbs:block=16,segment=32,tau=0.5,permute=both,order=queries_first,perm=query",
    "xattention:block=16,stride=4,tau=0.5",
    "xattention:block=16,stride=4,tau=0.5,mode=random,gqa=mean",
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
    "infinitehip:block=8,stride_1=2,chunk_1=16,budget_2=64,stride_2=2,chunk_2=8,budget_3=32,chunk_3=4,budget=16,sink=8,window=16,prefill_dense_below=0,first_dense_layers=0",
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
    "infinitehip:budget=100000,budget_2=100000,budget_3=100000,window=8,sink=8,prefill_dense_below=0,first_dense_layers=0",
    "oracle_topk:k=1000,block=8",
    "oracle_topk:tau=1,block=8",
    "minference",
];

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
