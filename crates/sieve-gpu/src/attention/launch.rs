//! Chooses the kernel, grid and TMA maps of an attention pass. Only this file chooses between the kernel families.
use crate::KernelError;
use crate::attention::{
    AttentionShape, BLOCK_KV, BackwardTiling, GradientSet, HopperTiling, KernelFamily, KeySource, KeyTiles, Qkv,
    QueryPass, QueryShares, QueryTiling, arriving, backward_maps, define_list_queries, hopper_backward_kernel,
};
use crate::runtime::{CudaTensor, SourceKernel, TileMap};

/// The tensors and sizes of an attention call. `d_o`, where a pass reads it, must be contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PassInputs<'a> {
    /// Name of the op, for error messages.
    pub(crate) name: &'static str,
    /// Heads with strides that the kernels take.
    pub(crate) qkv: &'a Qkv,
    /// Gradient of the output, for the passes that read it.
    pub(crate) d_o: Option<&'a CudaTensor>,
    /// Batch size, sequence length, numbers of heads and head widths.
    pub(crate) shape: &'a AttentionShape,
    /// How kernels read keys: consecutively or from a list.
    pub(crate) source: KeySource,
    /// Queries that share a list of keys; 1024 without lists.
    pub(crate) list_queries: usize,
}

impl<'a> PassInputs<'a> {
    /// Kernel, grid and maps of a query-stationary pass. The maps read q, k and v, and d_o where the pass reads it:
    /// these must be among the launch's tensors.
    ///
    /// # Errors
    /// [`KernelError::Refused`] when no tiling fits the device, or when the kernels do not take the heads' strides.
    pub(crate) fn by_query(
        &self,
        pass: QueryPass,
    ) -> Result<(SourceKernel, [usize; 3], Vec<TileMap<'a>>), KernelError> {
        let (shape, source) = (self.shape, self.source);
        let like = self.qkv.q.tensor();
        // Hopper kernels compute dq in the key-stationary pass, so `Gradient` is always portable.
        if self.family() == KernelFamily::Hopper && pass != QueryPass::Gradient {
            let tiling = HopperTiling::new(pass, shape, source);
            let d_o = self.d_o.filter(|_| pass.reads_gradient());
            let maps = tiling.maps(self.name, self.qkv, d_o, shape)?;
            return Ok((define_list_queries(tiling.kernel(), self.list_queries), tiling.grid(like), maps));
        }
        let limit = like.hardware().max_shared_bytes;
        let tiling = QueryTiling::choose(self.name, pass, shape, source, limit)?;
        let grid = tiling.grid(shape, source, self.list_queries);
        Ok((define_list_queries(tiling.kernel(shape, source), self.list_queries), grid, Vec::new()))
    }

    /// Keys of a thread block of a key-stationary pass, and how many such blocks the device runs at a time.
    ///
    /// # Errors
    /// The errors of [`by_query`](Self::by_query).
    pub(crate) fn key_tiles(&self) -> Result<KeyTiles, KernelError> {
        let hardware = self.qkv.q.tensor().hardware();
        let (block_kv, min_blocks) = match self.family() {
            KernelFamily::Hopper => (BLOCK_KV, 1),
            KernelFamily::Portable => {
                let tiling = BackwardTiling::choose(self.name, self.shape, self.source, hardware.max_shared_bytes)?;
                (tiling.block_kv(), tiling.min_blocks)
            }
        };
        let at_once = hardware.num_multiprocessors * min_blocks;
        Ok(KeyTiles { block_kv, at_once })
    }

    /// Kernel and maps of a key-stationary pass that computes the gradients in `set`, with `shares` thread blocks for
    /// each key tile; `head_by_head` as in [`hopper_backward_kernel`]. The maps read q and d_o, which must be among the
    /// launch's tensors.
    ///
    /// # Errors
    /// The errors of [`by_query`](Self::by_query).
    pub(crate) fn by_key(
        &self,
        set: GradientSet,
        shares: QueryShares,
        head_by_head: bool,
    ) -> Result<(SourceKernel, Vec<TileMap<'a>>), KernelError> {
        let (shape, source) = (self.shape, self.source);
        let policy = self.qkv.policy();
        if let (KernelFamily::Hopper, Some(d_o)) = (self.family(), self.d_o) {
            let maps = backward_maps(self.name, self.qkv, d_o, shape)?.to_vec();
            let kernel = arriving(hopper_backward_kernel(shape, source, policy.sums, head_by_head), policy);
            return Ok((shares.define(kernel), maps));
        }
        let limit = self.qkv.q.tensor().hardware().max_shared_bytes;
        let tiling = BackwardTiling::choose(self.name, shape, source, limit)?;
        let kernel = tiling.kernel(shape, source, set, policy.sums);
        Ok((shares.define(kernel), Vec::new()))
    }

    /// The family of the pass's kernels: portable or Hopper.
    pub(crate) fn family(&self) -> KernelFamily {
        KernelFamily::of(self.shape, self.source, self.qkv.q.tensor())
    }
}
