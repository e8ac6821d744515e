//! cuBLASLt's descriptors and algorithm for one GEMM, created once per shape and kept.
use super::problem::{Layout, OperandTypes, Problem, Tile};
use cudarc::cublaslt::result as lt;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulAlgoCheck,
    cublasLtMatmulAlgoConfigAttributes_t, cublasLtMatmulAlgoConfigGetAttribute, cublasLtMatmulAlgoConfigSetAttribute,
    cublasLtMatmulAlgoGetHeuristic, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
    cublasLtMatrixLayout_t, cublasLtReductionScheme_t, cudaDataType_t,
};
use cudarc::driver::sys::CUstream;
use sieve_gpu::step::Fp8Format;
use std::ffi::c_void;
use std::fmt;
use std::mem::MaybeUninit;

/// How many algorithms are requested from cuBLASLt's heuristic.
const MAX_ALGORITHMS: usize = 16;

/// Workspace that an algorithm may use: twice the 32 MiB that NVIDIA recommends for Hopper.
pub(super) const WORKSPACE_BYTES: usize = 64 << 20;

/// Why cuBLASLt did not queue a GEMM.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Refusal {
    /// cuBLASLt has no algorithm for it; the caller may compute it without cuBLASLt.
    NoAlgorithm(String),
    /// cuBLASLt, the driver or CubeCL's server failed.
    Failed(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::NoAlgorithm(reason) | Self::Failed(reason)) = self;
        f.write_str(reason)
    }
}

/// Descriptors of a GEMM with the algorithm that runs it.
#[derive(Debug)]
pub(super) struct Plan {
    operation: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 4],
    algorithm: cublasLtMatmulAlgo_t,
    operands: OperandTypes,
}

/// The operands of a launch, which differ between calls with one plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operands {
    /// Addresses of x, w, C and D.
    pub(super) pointers: [u64; 4],
    /// Addresses of the scales of x and w; 0 for bf16.
    pub(super) scales: [u64; 2],
    /// The factors `[alpha, beta]`.
    pub(super) factors: [f32; 2],
    pub(super) workspace: u64,
    pub(super) stream: CUstream,
}

impl Plan {
    /// Asks cuBLASLt's heuristic for algorithms. On Hopper it takes those that add in the one order, where the problem
    /// wants it, and of them the first of [`Problem::preferred_tiles`] that one has; else the heuristic's first.
    ///
    /// `alignments` are the alignments of x, w, C and D in bytes.
    pub(super) fn find(
        library: cublasLtHandle_t,
        problem: &Problem,
        alignments: [u32; 4],
        is_hopper: bool,
    ) -> Result<Self, Refusal> {
        let mut plan = Self::describe(problem)?;
        let mut found = plan.heuristic(library, alignments)?;
        let mut tiles: &[Tile] = &[];
        if is_hopper {
            tiles = problem.preferred_tiles();
            if problem.wants_one_order() {
                found = plan.in_one_order(library, found);
            }
        }
        let first = found.first().ok_or_else(|| Refusal::NoAlgorithm("the heuristic returned none".to_owned()))?;
        let with_tile = |tile: &Tile| found.iter().find(|algorithm| has_tile(algorithm, *tile));
        plan.algorithm = *tiles.iter().find_map(with_tile).unwrap_or(first);
        Ok(plan)
    }

    /// The plan with the algorithm of another problem's plan; `None` where the library does not take that.
    pub(super) fn with_algorithm_of(
        other: &Self,
        library: cublasLtHandle_t,
        problem: &Problem,
    ) -> Result<Option<Self>, Refusal> {
        let mut plan = Self::describe(problem)?;
        plan.algorithm = other.algorithm;
        Ok(plan.takes(library, &other.algorithm).then_some(plan))
    }

    /// Of the algorithms those that add k step by step in one order, whatever their tile: Hopper's own without a split
    /// of k, then the same with their split taken away. All of `found` if there is none, as for sizes that are no
    /// multiple of eight.
    fn in_one_order(&self, library: cublasLtHandle_t, found: Vec<cublasLtMatmulAlgo_t>) -> Vec<cublasLtMatmulAlgo_t> {
        let of_hopper: Vec<_> = found.iter().filter(|of| id(of) == Some(HOPPER_ALGORITHM)).copied().collect();
        let whole = of_hopper.iter().filter(|of| splits(of) <= 1).copied();
        let unsplit = of_hopper.iter().filter(|of| splits(of) > 1).filter_map(|of| self.without_split(library, *of));
        let fitting: Vec<_> = whole.chain(unsplit).collect();
        if fitting.is_empty() { found } else { fitting }
    }

    /// The algorithm without its split of k; `None` where the library does not take that.
    fn without_split(
        &self,
        library: cublasLtHandle_t,
        mut algorithm: cublasLtMatmulAlgo_t,
    ) -> Option<cublasLtMatmulAlgo_t> {
        use cublasLtMatmulAlgoConfigAttributes_t as Setting;
        let none = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        for (setting, value) in
            [(Setting::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 1), (Setting::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, none)]
        {
            let (value, size) = ((&raw const value).cast(), size_of::<u32>());
            // SAFETY: both settings are of 32 bits.
            unsafe { cublasLtMatmulAlgoConfigSetAttribute(&mut algorithm, setting, value, size) }.result().ok()?;
        }
        self.takes(library, &algorithm).then_some(algorithm)
    }

    /// Whether the library runs the plan's operation by an algorithm, within the workspace.
    fn takes(&self, library: cublasLtHandle_t, algorithm: &cublasLtMatmulAlgo_t) -> bool {
        let [a, b, c, d] = self.layouts;
        let mut checked = MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit();
        // SAFETY: the descriptors are alive, and the call fills the result if it succeeds.
        unsafe {
            let status = cublasLtMatmulAlgoCheck(library, self.operation, a, b, c, d, algorithm, checked.as_mut_ptr());
            status.result().is_ok() && checked.assume_init().workspaceSize <= WORKSPACE_BYTES
        }
    }

    /// Queues the GEMM.
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
        .map_err(failed("cublasLtMatmul"))
    }

    /// The descriptors of a problem, without an algorithm.
    fn describe(problem: &Problem) -> Result<Self, Refusal> {
        let [a, b, c, d] = problem.layouts();
        let bf16 = cudaDataType_t::CUDA_R_16BF;
        let fp8 = |format| match format {
            Fp8Format::E4m3 => cudaDataType_t::CUDA_R_8F_E4M3,
            Fp8Format::E5m2 => cudaDataType_t::CUDA_R_8F_E5M2,
        };
        let [x_type, w_type] = match problem.operands {
            OperandTypes::Bf16 => [bf16; 2],
            OperandTypes::Fp8 { x, w } => [x, w].map(fp8),
        };
        let output = if problem.is_f32 { cudaDataType_t::CUDA_R_32F } else { bf16 };
        let operation = lt::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType_t::CUDA_R_32F)
            .map_err(failed("cublasLtMatmulDescCreate"))?;
        // The layouts are created one by one below: if one fails, dropping `plan` destroys those before it.
        let mut plan = Self {
            operation,
            layouts: [std::ptr::null_mut(); 4],
            algorithm: cublasLtMatmulAlgo_t { data: [0; 8] },
            operands: problem.operands,
        };
        let [transpose_a, transpose_b] = [a, b].map(|layout| i32::from(layout.is_transposed));
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a)?;
        plan.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b)?;
        if problem.operands.sum_fast() {
            plan.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &1i8)?;
        }
        for (slot, (layout, dtype)) in plan.layouts.iter_mut().zip([(a, w_type), (b, x_type), (c, output), (d, output)])
        {
            let Layout { rows, cols, leading, .. } = layout;
            *slot =
                lt::create_matrix_layout(dtype, rows, cols, leading).map_err(failed("cublasLtMatrixLayoutCreate"))?;
        }
        Ok(plan)
    }

    /// Sets an attribute of the operation; `value` must be of the attribute's type.
    fn set<T: Copy>(&self, attribute: Attribute, value: &T) -> Result<(), Refusal> {
        // SAFETY: the descriptor is alive, and the value has the size that is passed.
        unsafe { lt::set_matmul_desc_attribute(self.operation, attribute, (&raw const *value).cast(), size_of::<T>()) }
            .map_err(failed("cublasLtMatmulDescSetAttribute"))
    }

    /// The algorithms that cuBLASLt's heuristic offers, its favourite first; `[x, w, c, d]` are alignments in bytes.
    fn heuristic(
        &self,
        library: cublasLtHandle_t,
        [x, w, c, d]: [u32; 4],
    ) -> Result<Vec<cublasLtMatmulAlgo_t>, Refusal> {
        use cublasLtMatmulPreferenceAttributes_t as Limit;
        let preference = Preference::new()?;
        preference.set(Limit::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &WORKSPACE_BYTES)?;
        // Split-K partial sums must be added in f32: some algorithms would add them in the output's bf16.
        let scheme = cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        preference.set(Limit::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &scheme)?;
        // cuBLASLt's A is our w, its B is our x.
        for (limit, bytes) in [
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, w),
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, x),
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Limit::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, d),
        ] {
            preference.set(limit, &bytes)?;
        }
        let mut found = [const { MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit() }; MAX_ALGORITHMS];
        let mut count = 0;
        let [a, b, c, d] = self.layouts;
        // SAFETY: the descriptors are alive, and the array has room for MAX_ALGORITHMS results.
        let status = unsafe {
            cublasLtMatmulAlgoGetHeuristic(
                library,
                self.operation,
                a,
                b,
                c,
                d,
                preference.0,
                MAX_ALGORITHMS as i32,
                found.as_mut_ptr().cast(),
                &mut count,
            )
        };
        status.result().map_err(|e| Refusal::NoAlgorithm(e.to_string()))?;
        let found = found.iter().take(count.max(0) as usize);
        // SAFETY: the call filled the first `count`.
        let found = found.map(|result| unsafe { result.assume_init_ref() });
        Ok(found.filter(|result| result.state.result().is_ok()).map(|result| result.algo).collect())
    }
}

/// cuBLASLt's id of the algorithm whose kernels are written for Hopper (`nvjet`), whatever their tile.
const HOPPER_ALGORITHM: i32 = 66;

/// cuBLASLt's id of an algorithm.
fn id(algorithm: &cublasLtMatmulAlgo_t) -> Option<i32> {
    configured(algorithm, cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_ID)
}

/// Parts into which an algorithm splits k, that are added up afterwards.
fn splits(algorithm: &cublasLtMatmulAlgo_t) -> u32 {
    configured(algorithm, cublasLtMatmulAlgoConfigAttributes_t::CUBLASLT_ALGO_CONFIG_SPLITK_NUM).unwrap_or(0)
}

/// Whether an algorithm has this tile and its cluster.
fn has_tile(algorithm: &cublasLtMatmulAlgo_t, tile: Tile) -> bool {
    use cublasLtMatmulAlgoConfigAttributes_t as Setting;
    let (tile_id, cluster_id) = tile.ids();
    configured(algorithm, Setting::CUBLASLT_ALGO_CONFIG_TILE_ID) == Some(tile_id)
        && configured(algorithm, Setting::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) == Some(cluster_id)
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
            // SAFETY: created by `describe`, destroyed once. A failure only leaks a few bytes.
            let _ = unsafe { lt::destroy_matrix_layout(layout) };
        }
        // SAFETY: as above.
        let _ = unsafe { lt::destroy_matmul_desc(self.operation) };
    }
}

/// cuBLASLt's descriptor of the limits within which its heuristic looks for algorithms.
struct Preference(cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, Refusal> {
        lt::create_matmul_pref().map(Self).map_err(failed("cublasLtMatmulPreferenceCreate"))
    }

    /// Sets a limit; `value` must be of the limit's type.
    fn set<T: Copy>(&self, limit: cublasLtMatmulPreferenceAttributes_t, value: &T) -> Result<(), Refusal> {
        // SAFETY: the preference is alive, and the value has the size that is passed.
        unsafe { lt::set_matmul_pref_attribute(self.0, limit, (&raw const *value).cast(), size_of::<T>()) }
            .map_err(failed("cublasLtMatmulPreferenceSetAttribute"))
    }
}

/// The refusal for an error of cuBLASLt's function `name`.
fn failed(name: &str) -> impl FnOnce(lt::CublasError) -> Refusal {
    move |error| Refusal::Failed(format!("{name}: {error}"))
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}
