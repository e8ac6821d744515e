//! `sieve kernels run dma | swa --parts N`: context parallelism, with a thread for each rank and its part of the rows.
use super::branches::Tensors;
use crate::case::{Case, Keys, scaled_normals};
use crate::error::{Result, refused};
use crate::outputs::Outputs;
use crate::shape::{keys_of, packed_of, queries_of, values_of};
use crate::strided::packed;
use crate::tensors::{Computes, floats, indices, typed, wrapped};
use burn::tensor::{DType, TensorMetadata};
use sieve_core::DmaShape;
use sieve_hf::NamedTensor;
use sieve_kernels::AttentionShape;
use sieve_ops::{ContextParallel, DmaLayer, ThreadGroup, TracedPart};
use sieve_testing::Random;
use std::sync::Arc;

/// Refuses a number of parts that does not divide the rows.
pub(super) fn check(parts: usize, shape: &AttentionShape) -> Result<()> {
    let seq_len = shape.seq_len;
    if parts < 2 || !seq_len.is_multiple_of(parts) {
        return refused(format!(
            "--parts {parts}: rows of {seq_len} tokens are cut into two parts or more, of equal length"
        ));
    }
    if shape.head_dim != shape.head_dim_v {
        return refused("--parts takes keys and values of one width\n  hint: leave head_dim_v out");
    }
    Ok(())
}

/// The tensors of the file: the whole rows, then for each part the halo (keys and values of earlier parts that its
/// queries may see), the output and the gradients. DMA's scores are computed from the values, as
/// published.
pub(super) fn tensors<B: Computes>(case: &Case, num_parts: usize, seed: u64, device: &B::Device) -> Vec<NamedTensor> {
    let shape = case.shape;
    let (kv_heads, d) = (shape.num_kv_heads, shape.head_dim);
    let mut random = Random(seed ^ 0x7061_7274); // "part" in ASCII: other numbers than the case's
    let factor = 1.0 / ((kv_heads * d) as f32).sqrt();
    let w_dt = scaled_normals(&mut random, kv_heads * d * kv_heads, factor);
    let a: Vec<f32> = random.bf16_normals(kv_heads);
    let dma = match case.keys {
        Keys::Chosen(window) => Some(DmaShape {
            local_window_size: window.local_window_size,
            ..DmaShape::published(window.keep_window_size)
        }),
        _ => None,
    };
    let mut tensors = Tensors::new(B::DTYPE);
    tensors.qkv(case);
    tensors.floats("do", &case.d_o, &shape.output(), DType::BF16);
    if dma.is_some() {
        tensors.floats("w_dt", &w_dt, &[kv_heads, kv_heads * d], DType::BF16);
        tensors.floats("a", &a, &[kv_heads], DType::BF16);
    }
    let qkv = packed(case);
    let len = shape.seq_len / num_parts; // tokens of a part
    let own_shape = AttentionShape { seq_len: len, ..shape };
    // Inputs and results of one rank, as tensors of the file.
    let of_rank = |links: ThreadGroup| {
        let rank = sieve_ops::RankGroup::part(&links);
        let parts = ContextParallel::new(Arc::new(links), case.bounds(), [shape.batch, shape.seq_len]);
        // The rank's tokens of every row.
        let own = |values: &[f32], heads: usize| {
            let token_len = heads * d;
            let rows = values.chunks_exact(shape.seq_len * token_len);
            let own: Vec<f32> =
                rows.flat_map(|row| row[rank * len * token_len..][..len * token_len].to_vec()).collect();
            typed::<B, 4>(&own, [shape.batch, len, heads, d], device)
        };
        let [_, _, heads, _] = packed_of(shape);
        let inputs = [own(&qkv, heads), own(&case.d_o, shape.num_heads)];
        let dma = dma.map(|spec| DmaLayer {
            w_dt: wrapped(typed::<B, 2>(&w_dt, [kv_heads, kv_heads * d], device)),
            a: wrapped(typed::<B, 1>(&a, [kv_heads], device)),
            spec,
        });
        let traced = TracedPart::<B>::new(&parts, inputs, dma, case.spec(case.sliding_window()), device);
        let name = |what: &str| format!("part{rank}.{what}");
        let mut tensors = Tensors::new(B::DTYPE);
        if let Some(halo) = traced.halo {
            tensors.output(&name("halo"), &floats::<B, 4>(halo.clone()), &halo.shape());
        }
        if let Some(ranks) = traced.halo_ranks {
            let values = floats::<B, 3>(ranks.clone());
            tensors.floats(&name("halo_ranks"), &values, &ranks.shape(), DType::F32);
        }
        if let Some(expire) = traced.expire {
            tensors.ints(&name("expire"), indices::<B, 3>(expire.clone()), &expire.shape());
        }
        for (what, bounds) in ["doc_start", "doc_end"].into_iter().zip(traced.documents) {
            tensors.ints(&name(what), indices::<B, 2>(bounds.clone()), &bounds.shape());
        }
        tensors.output(&name("o"), &floats::<B, 4>(traced.o), &own_shape.output());
        let mut gradients = Outputs::default();
        gradients.set_packed_gradient(own_shape, &floats::<B, 4>(traced.d_qkv));
        tensors.output(&name("dq"), &gradients.dq, &queries_of(own_shape));
        tensors.output(&name("dk"), &gradients.dk, &keys_of(own_shape));
        tensors.output(&name("dv"), &gradients.dv, &values_of(own_shape));
        if let Some([d_w_dt, d_a]) = traced.d_dma {
            let d_w_dt = floats::<B, 2>(d_w_dt);
            tensors.floats(&name("dw_dt"), &d_w_dt, &[kv_heads, kv_heads * d], DType::F32);
            tensors.floats(&name("da"), &floats::<B, 1>(d_a), &[kv_heads], DType::F32);
        }
        tensors.list
    };
    std::thread::scope(|scope| {
        let of_rank = &of_rank;
        let ranks = ThreadGroup::all(num_parts).into_iter();
        let ranks: Vec<_> = ranks.map(|links| scope.spawn(move || of_rank(links))).collect();
        for rank in ranks {
            let part = rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            tensors.list.extend(part);
        }
    });
    tensors.finish(case.cu_seqlens())
}
