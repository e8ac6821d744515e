//! One product's descriptors and algorithm, made once per shape and kept.
use super::library::Refusal;
use super::problem::{Layout, Operands as OperandTypes, Problem, Tile};
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulAlgoConfigAttributes_t,
    cublasLtMatmulAlgoConfigGetAttribute, cublasLtMatmulAlgoGetHeuristic, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasLtReductionScheme_t, cudaDataType_t,
};
use cudarc::driver::sys::CUstream;
use sieve_gpu::step::Fp8Format;
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// How many algorithms are requested from the heuristic.
const ASKED: usize = 16;

/// Memory that algorithms may use: what NVIDIA recommends for Hopper, doubled.
pub(super) const WORKSPACE_BYTES: usize = 64 << 20;

/// Descriptors of a product with the algorithm that runs it.
#[derive(Debug)]
pub(super) struct Plan {
    operation: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 4],
    algorithm: cublasLtMatmulAlgo_t,
    operands: OperandTypes,
}

/// What a launch needs besides its plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    /// Addresses of x, w, C and D.
    pub(super) pointers: [u64; 4],
    /// Addresses of the scales of x and w; for fp8 alone.
    pub(super) scales: [u64; 2],
    /// Of the product and of C.
    pub(super) factors: [f32; 2],
    pub(super) workspace: u64,
    pub(super) stream: CUstream,
}

impl Plan {
    /// Queries cuBLASLt's algorithms, and takes the one with the first of `tiles` that is offered, else cuBLASLt's
    /// first.
    ///
    /// `alignments` are the alignments of x, w, C and D in bytes.
    pub(super) fn find(
        library: cublasLtHandle_t,
        problem: &Problem,
        alignments: [u32; 4],
        tiles: &[Tile],
    ) -> Result<Self, Refusal> {
        let mut plan = Self::describe(problem)?;
        let found = plan.heuristic(library, alignments)?;
        let first = found
            .first()
            .ok_or_else(|| Refusal::NoAlgorithm("the heuristic knows none".to_owned()))?;
        let offered = |tile: &Tile| found.iter().find(|found| has_tile(found, *tile));
        let offered = tiles.iter().find_map(offered);
        plan.algorithm = *offered.unwrap_or(first);
        Ok(plan)
    }

    /// Queues the product.
    ///
    /// # Safety
    /// The addresses must hold matrices of the plan's layouts, the workspace [`WORKSPACE_BYTES`], on the current
    /// context.
    pub(super) unsafe fn launch(&self, library: cublasLtHandle_t, operands: &Operands) -> Result<(), Refusal> {
        let [alpha, beta] = operands.factors;
        let [x, w, c, d] = operands.pointers.map(|address| address as *mut c_void);
        let [a_layout, b_layout, c_layout, d_layout] = self.layouts;
        if self.operands != OperandTypes::Bf16 {
            let [x_scale, w_scale] = operands.scales;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &w_scale)?;
            self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x_scale)?;
        }
        // SAFETY: the caller's promise; alpha and beta are read before the call returns.
        unsafe {
            lt::matmul(
                library,
                self.operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                w,
                a_layout,
                x,
                b_layout,
                c,
                c_layout,
                d,
                d_layout,
                &self.algorithm,
                operands.workspace as *mut c_void,
                WORKSPACE_BYTES,
                operands.stream.cast(),
            )
        }
        .map_err(|e| Refusal::Failed(format!("cublasLtMatmul: {e}")))
    }

    fn describe(problem: &Problem) -> Result<Self, Refusal> {
        let [a, b, c, d] = problem.layouts();
        let bf16 = cudaDataType_t::CUDA_R_16BF;
        let eight_bits = |format| match format {
            Fp8Format::E4m3 => cudaDataType_t::CUDA_R_8F_E4M3,
            Fp8Format::E5m2 => cudaDataType_t::CUDA_R_8F_E5M2,
        };
        let [x_type, w_type] = match problem.operands {
            OperandTypes::Bf16 => [bf16; 2],
            OperandTypes::Fp8 { x, w } => [x, w].map(eight_bits),
        };
        let output = if problem.is_f32 {
            cudaDataType_t::CUDA_R_32F
        } else {
            bf16
        };
        let operation = lt::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F)
            .map_err(|e| Refusal::Failed(format!("cublasLtMatmulDescCreate: {e}")))?;
        // The layouts follow one by one, so that a failure half way frees what there is.
        let mut plan = Self {
            operation,
            layouts: [std::ptr::null_mut(); 4],
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            operands: problem.operands,
        };
        let [is_a, is_b] = [a, b].map(|layout| i32::from(layout.is_transposed));
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &is_a)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &is_b)?;
        if problem.operands.sum_fast() {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
        }
        for (slot, (layout, dtype)) in plan
            .layouts
            .iter_mut()
            .zip([(a, w_type), (b, x_type), (c, output), (d, output)])
        {
            let Layout {
                rows, cols, leading, ..
            } = layout;
            *slot = lt::create_matrix_layout(dtype, rows, cols, leading)
                .map_err(|e| Refusal::Failed(format!("cublasLtMatrixLayoutCreate: {e}")))?;
        }
        Ok(plan)
    }

    /// Sets an attribute of the operation; `value` must be of the attribute's type.
    fn set<T: Copy>(&self, attribute: Attribute, value: &T) -> Result<(), Refusal> {
        // SAFETY: the descriptor is alive, and the value has the size that is passed.
        unsafe { lt::set_matmul_desc_attribute(self.operation, attribute, (&raw const *value).cast(), size_of::<T>()) }
            .map_err(|e| Refusal::Failed(format!("cublasLtMatmulDescSetAttribute: {e}")))
    }

    fn heuristic(
        &self,
        library: cublasLtHandle_t,
        [x, w, c, d]: [u32; 4],
    ) -> Result<Vec<cublasLtMatmulAlgo_t>, Refusal> {
        use cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference::new()?;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        // Parts of a product may be added up in f32 only: some algorithms would add them in the output's bf16.
        let scheme = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        // A is w and B is x.
        for (attribute, bytes) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, w),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
        ] {
            preference.set(attribute, &bytes)?;
        }
        let mut found = [const { MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit() }; ASKED];
        let mut count = 0;
        let [a, b, c, d] = self.layouts;
        // SAFETY: the descriptors are alive, and the array has room for as many results as are asked for.
        let status = unsafe {
            cublasLtMatmulAlgoGetHeuristic(
                library,
                self.operation,
                a,
                b,
                c,
                d,
                preference.0,
                ASKED as i32,
                found.as_mut_ptr().cast(),
                &mut count,
            )
        };
        status.result().map_err(|e| Refusal::NoAlgorithm(e.to_string()))?;
        let found = found.iter().take(count.max(0) as usize);
        // SAFETY: the call filled the first `count`.
        let found = found.map(|result| unsafe { result.assume_init_ref() });
        Ok(found
            .filter(|result| result.state.result().is_ok())
            .map(|result| result.algo)
            .collect())
    }
}

/// Whether an algorithm has this tile and cluster.
fn has_tile(algorithm: &cublasLtMatmulAlgo_t, cut: Tile) -> bool {
    use cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let (tile, cluster) = cut.numbers();
    configured(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_TILE_ID) == Some(tile)
        && configured(algorithm, Attribute::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) == Some(cluster)
}

/// A setting of an algorithm; `T` is the setting's type.
fn configured<T: Copy + Default>(
    algorithm: &cublasLtMatmulAlgo_t,
    attribute: cublasLtMatmulAlgoConfigAttributes_t,
) -> Option<T> {
    let (mut value, mut written) = (T::default(), 0);
    // SAFETY: the library writes at most the number of bytes passed.
    let status = unsafe {
        cublasLtMatmulAlgoConfigGetAttribute(
            algorithm,
            attribute,
            (&raw mut value).cast(),
            size_of::<T>(),
            &mut written,
        )
    };
    status.result().ok().map(|()| value)
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: made by `describe`, dropped once. A failure leaves a few bytes behind.
            let _ = unsafe { lt::destroy_matrix_layout(layout) };
        }
        // SAFETY: as above.
        let _ = unsafe { lt::destroy_matmul_desc(self.operation) };
    }
}

/// What an algorithm must respect.
struct Preference(cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, Refusal> {
        lt::create_matmul_pref()
            .map(Self)
            .map_err(|e| Refusal::Failed(format!("cublasLtMatmulPreferenceCreate: {e}")))
    }

    fn set<T: Copy>(&self, attribute: cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<(), Refusal> {
        // SAFETY: the preference is alive, and the value has the size that is passed.
        unsafe { lt::set_matmul_pref_attribute(self.0, attribute, (&raw const *value).cast(), size_of::<T>()) }
            .map_err(|e| Refusal::Failed(format!("cublasLtMatmulPreferenceSetAttribute: {e}")))
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `new`, dropped once.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}
