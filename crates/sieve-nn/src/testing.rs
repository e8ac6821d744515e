//! Shapes, inputs and comparisons of the layers' tests.
use crate::LayerContext;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use sieve_core::model::test_shapes::block_kinds;
use sieve_core::{
    Attention, CowaShape, DmaShape, IndexScores, MlaShape, ModelShape, MsaShape, NsaCompression, NsaShape,
};
use sieve_ops::{Documents, RotaryEmbedding};
use sieve_testing::Random;
pub(crate) use sieve_testing::assert_close;

/// A small model whose sizes all differ.
pub(crate) fn shape(attention: Attention) -> ModelShape {
    ModelShape {
        d_model: 24,
        d_ff: 40,
        num_layers: 2,
        num_heads: 6,
        num_kv_heads: 3,
        head_dim: 8,
        tie_word_embeddings: true,
        initializer_range: 0.2,
        residual_scale: false,
        attention,
        ..sieve_core::model::test_shapes::tiny_dma()
    }
}

/// Most keys that a query sees in the window and in DMA layers of the tests.
pub(crate) const KEEP_WINDOW_SIZE: usize = 5;

/// NSA with blocks of four tokens, three of which are selected, and with the window of the other kinds' models.
pub(crate) fn nsa(compress: NsaCompression, shared_kv: bool) -> Attention {
    Attention::Nsa(NsaShape {
        compress_block_size: 4,
        compress_stride: 2,
        compress,
        compress_hidden_size: (compress == NsaCompression::Mlp).then_some(10),
        select_block_size: 4,
        num_selected_blocks: 3,
        window_size: KEEP_WINDOW_SIZE,
        shared_kv,
    })
}

/// The kinds, DMA with gates at `a_init`: MHA, SWA, DMA, MLA, NSA in three forms, MLA without norms of queries and
/// keys, the kinds that choose blocks, MSA with two local blocks and with QSA's scores, and CoWindow.
pub(crate) fn kinds(a_init: f64) -> [Attention; 14] {
    let mla = MlaShape { kv_lora_rank: 10, qk_rope_head_dim: 4, qk_norm: true };
    let msa = MsaShape { select_block_size: 4, num_selected_blocks: 3, ..MsaShape::published() };
    let [pooled, by_head, indexed] = block_kinds(&[
        ("compress_block_size", 4),
        ("compress_stride", 2),
        ("select_block_size", 4),
        ("num_selected_blocks", 3),
        ("num_local_blocks", 1),
    ]);
    [
        Attention::Mha,
        Attention::swa(KEEP_WINDOW_SIZE),
        Attention::Dma(DmaShape { a_init, ..DmaShape::published(KEEP_WINDOW_SIZE) }),
        Attention::Mla(mla),
        nsa(NsaCompression::Mlp, true),
        nsa(NsaCompression::Mean, false),
        nsa(NsaCompression::Mlp, false),
        Attention::Mla(MlaShape { qk_norm: false, ..mla }),
        pooled,
        by_head,
        indexed,
        Attention::Msa(MsaShape { num_local_blocks: 2, ..msa }),
        Attention::Msa(MsaShape { indexer: IndexScores::Qsa, ..msa }),
        Attention::Cowa(CowaShape { sink_tokens: 2, near_window: 3, far_reach: 15, num_bands: 3 }),
    ]
}

/// MSA while its indexer learns: queries read all keys.
pub(crate) fn msa_in_warmup() -> Attention {
    Attention::Msa(MsaShape {
        select_block_size: 4,
        num_selected_blocks: 2,
        index_warmup: true,
        ..MsaShape::published()
    })
}

/// Normal values.
pub(crate) fn input<B: Backend, const D: usize>(dims: [usize; D], seed: u64) -> Tensor<B, D> {
    let values = Random(seed).vector(dims.iter().product());
    Tensor::from_data(TensorData::new(values, dims), &Default::default())
}

/// Token ids below the vocabulary of [`shape`].
pub(crate) fn ids<B: Backend>(dims: [usize; 2], seed: usize) -> Tensor<B, 2, Int> {
    let ids: Vec<i32> = (0..dims[0] * dims[1]).map(|n| ((n * 31 + seed * 17 + n * n) % 50) as i32).collect();
    Tensor::from_data(TensorData::new(ids, dims), &Default::default())
}

/// One document per row, and its tables.
pub(crate) struct Rows<B: Backend> {
    documents: Documents<B>,
    rope: RotaryEmbedding<B>,
}

impl<B: Backend> Rows<B> {
    /// Rows of `dims`, `[batch, tokens]`.
    pub(crate) fn new(dims: [usize; 2], shape: &ModelShape) -> Self {
        let device = Default::default();
        Self {
            documents: Documents::whole_rows(dims, &device),
            rope: RotaryEmbedding::new(crate::pass::rope_dim(shape), dims[1], shape.rope_theta, &device),
        }
    }

    pub(crate) fn context(&self) -> LayerContext<'_, B> {
        LayerContext::new(&self.documents, &self.rope)
    }
}

pub(crate) fn values<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}
