//! The ops of attention layers, by name, and what their CUDA kernels do.

/// An op of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionOp {
    /// Dense or windowed attention.
    Attention,
    /// Attention over latents.
    LatentAttention,
    /// NSA's compression of blocks.
    Compression,
    /// NSA's choice of blocks.
    Selection,
    /// NSA's attention over chosen blocks and its window.
    SelectedAndWindow,
    /// DMA's scores of keys.
    DmaScores,
    /// DMA's exact choice of keys.
    DmaSelection,
    /// DMA's attention over the chosen keys.
    DmaAttention,
    /// The choice of blocks by pooled keys, or by an indexer's scores of every key.
    Choice,
    /// The choice of blocks by an indexer's pooled keys.
    PooledChoice,
    /// Attention over the blocks of a choice.
    ChosenAttention,
}

impl AttentionOp {
    /// Name of the op in plans.
    pub fn name(self) -> &'static str {
        match self {
            Self::Attention => "attention",
            Self::LatentAttention => "latent attention",
            Self::Compression => "compression",
            Self::Selection => "selection",
            Self::SelectedAndWindow => "selected and window attention",
            Self::DmaScores => "dma scores",
            Self::DmaSelection => "dma selection",
            Self::DmaAttention => "dma attention",
            Self::Choice | Self::PooledChoice => "choice of blocks",
            Self::ChosenAttention => "attention over chosen blocks",
        }
    }

    /// What the CUDA kernel does.
    pub fn on_cuda(self) -> &'static str {
        match self {
            Self::Attention | Self::LatentAttention | Self::DmaScores => "bf16 in, f32 sums; packed documents",
            Self::DmaAttention => "keys gathered by list, none outside it is read",
            Self::DmaSelection => "exact top w as one integer a key; no n x n mask",
            Self::Compression => "blocks or their means in one pass, the MLP by cuBLASLt",
            Self::Selection => "compressed keys by list, importance and choice on the chip; no n x n scores",
            Self::PooledChoice => "scores by cuBLASLt of some queries at a time, chosen on the chip; no n x n scores",
            Self::Choice => "pooled keys scored and chosen on the chip; no n x n scores",
            Self::SelectedAndWindow | Self::ChosenAttention => "block by block over the queries that chose it",
        }
    }

    /// Whether the kernel takes a bounded number of KV heads.
    pub fn bounds_kv_heads(self) -> bool {
        self == Self::DmaScores
    }
}
