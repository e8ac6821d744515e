//! DMA's ops on the CPU.
use super::backend::{DmaBackend, DmaGradients, DmaSelection};
use super::reference;
use crate::attention::flex::{attention_shape, backward, contiguous_bounds, documents, forward};
use crate::attention::{AttentionOutput, AttentionSpec};
use crate::device::flex::{contiguous, floats, from_vec, ints, is_f32, plain, plain_scores, zeros_like};
use crate::device::paths::scores;
use crate::documents::DocumentBounds;
use burn::tensor::{TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use sieve_core::{DmaWindow, KeepRest};

impl DmaBackend for Flex {
    fn dma_scores(qkv: FlexTensor, w_dt: FlexTensor, a: FlexTensor, spec: AttentionSpec) -> FlexTensor {
        if !is_f32(&qkv) {
            return plain("dma_scores", || reference::dma_scores::<Self>(qkv, w_dt, a, spec));
        }
        // The kernel reads W_dt by KV head; a layer stores it so, and hands over a transposed view.
        let [qkv, w, a] = [qkv, w_dt.transpose(0, 1), a].map(contiguous);
        let shape = attention_shape(&qkv, spec);
        let mut z = vec![0.0; shape.batch * shape.num_kv_heads * shape.seq_len];
        sieve_cpu::dma_scores_forward(shape, floats(&qkv), floats(&w), floats(&a), &mut z);
        from_vec(z, [shape.batch, shape.num_kv_heads, shape.seq_len])
    }

    fn dma_select(rank: FlexTensor, bounds: &DocumentBounds<Self>, window: DmaWindow) -> DmaSelection<Self> {
        if !is_f32(&rank) {
            return plain("dma_select", || reference::dma_select::<Self>(rank, bounds, window));
        }
        let (rank, bounds) = (contiguous(rank), contiguous_bounds(bounds));
        let shape = rank.shape();
        let mut expire = vec![0i32; shape.num_elements()];
        let documents = documents(&bounds);
        sieve_cpu::dma_select(
            floats(&rank),
            documents,
            shape[0],
            shape[1],
            shape[2],
            window.num_ranked(),
            &mut expire,
        );
        let local = window.local_window_size;
        sieve_cpu::extend_expire(&mut expire, documents, shape[1], shape[2], local);
        let expire = FlexTensor::from_data(TensorData::new(expire, shape));
        DmaSelection::of_expire(expire)
    }

    fn dma_attention(
        qkv: FlexTensor,
        delta: FlexTensor,
        bounds: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        _rest: KeepRest,
    ) -> AttentionOutput<Self> {
        if !is_f32(&qkv) {
            return plain_scores("dma_attention", scores(&qkv, spec.num_heads), || {
                reference::dma_attention::<Self>(qkv, delta, bounds, selection, spec)
            });
        }
        let [qkv, delta, expire] = [qkv, delta, selection.expire.clone()].map(contiguous);
        let mask = sieve_cpu::Mask::Expire {
            expire: ints(&expire),
            delta: floats(&delta),
        };
        forward(&qkv, &contiguous_bounds(bounds), mask, spec)
    }
}

impl DmaGradients for Flex {
    fn dma_scores_backward(
        qkv: FlexTensor,
        w_dt: FlexTensor,
        a: FlexTensor,
        spec: AttentionSpec,
        dz: FlexTensor,
        dqkv: FlexTensor,
    ) -> (FlexTensor, FlexTensor, FlexTensor) {
        if !is_f32(&qkv) {
            return plain("dma_scores_backward", || {
                reference::dma_scores_backward::<Self>(qkv, w_dt, a, spec, dz, dqkv)
            });
        }
        let [qkv, w, a] = [qkv, w_dt.transpose(0, 1), a].map(contiguous);
        let [dz, mut dqkv] = [dz, dqkv].map(contiguous);
        let (mut dw, mut da) = (zeros_like(&w), zeros_like(&a));
        sieve_cpu::dma_scores_backward(
            attention_shape(&qkv, spec),
            floats(&qkv),
            floats(&w),
            floats(&a),
            floats(&dz),
            dqkv.storage_mut(),
            &mut dw,
            &mut da,
        );
        let dw = from_vec(dw, w.shape()).transpose(0, 1);
        (dqkv, dw, from_vec(da, a.shape()))
    }

    fn dma_attention_backward(
        qkv: FlexTensor,
        delta: FlexTensor,
        bounds: &DocumentBounds<Self>,
        selection: &DmaSelection<Self>,
        spec: AttentionSpec,
        output: AttentionOutput<Self>,
        d_o: FlexTensor,
    ) -> (FlexTensor, FlexTensor) {
        if !is_f32(&qkv) {
            return plain_scores("dma_attention_backward", scores(&qkv, spec.num_heads), || {
                reference::dma_attention_backward::<Self>(qkv, delta, bounds, selection, spec, output, d_o)
            });
        }
        let [qkv, delta, expire] = [qkv, delta, selection.expire.clone()].map(contiguous);
        let mask = sieve_cpu::Mask::Expire {
            expire: ints(&expire),
            delta: floats(&delta),
        };
        let mut d_delta = zeros_like(&delta);
        let operands = [output.o, output.lse, d_o];
        let bounds = contiguous_bounds(bounds);
        let dqkv = backward(&qkv, &bounds, mask, spec, operands, Some(&mut d_delta));
        (dqkv, from_vec(d_delta, delta.shape()))
    }
}
