//! Turns a request into launches by sieve-gpu's wrappers. An op is a type in the file of its family: its settings,
//! inputs and outputs, and its launches.
mod attention;
mod chosen;
mod decode;
mod dma;
mod nsa;

use crate::request::{PlanError, Request};
use serde::{Deserialize, Serialize};
use sieve_core::KeepOLow;
use sieve_gpu::{
    AttentionGradients, AttentionResult, CudaTensor, DType, KernelError, KernelPolicy, KeyOrder, Qkv, Recorder,
    SumOrder,
};
use std::cell::Cell;

/// Inputs or outputs by name, in the order of their pointers. Outputs of one name are parts of one buffer.
pub(crate) type Named = Vec<(String, CudaTensor)>;

/// Records an op; returns its inputs and outputs.
pub(crate) fn record(request: &Request, gpu: &Recorder) -> Result<[Named; 2], PlanError> {
    let inputs = Inputs::new(request, gpu)?;
    let outputs = request.call.launches(&inputs)?;
    inputs.all_used()?;
    let inputs = inputs.tensors.into_iter().map(|(name, tensor, _)| (name, tensor));
    let outputs = outputs.into_iter().map(|(name, tensor)| (name.to_owned(), tensor));
    Ok([inputs.collect(), outputs.collect()])
}

/// Declares the ops: a type for each, its settings and the launches, and its name in requests.
macro_rules! ops {
    ($($family:ident { $($op:ident = $name:literal,)* })*) => {
        $($(pub use $family::$op;)*)*

        /// An op with its settings; `fixed_order` makes two runs bit-equal. The type of each op names its inputs → its
        /// outputs, with `?` after an optional tensor.
        #[derive(Debug, Clone, Deserialize, Serialize)]
        pub enum Call {
            $($(#[doc = concat!("See [`", stringify!($op), "`].")] #[serde(rename = $name)] $op($op),)*)*
        }

        impl Call {
            /// Name of the op in requests.
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $($(Self::$op(_) => $name,)*)*
                }
            }

            /// Records the launches of the op on its inputs; returns its outputs.
            fn launches(&self, inputs: &Inputs) -> Result<Outputs, PlanError> {
                match self {
                    $($(Self::$op(op) => op.launches(inputs),)*)*
                }
            }
        }
    };
}

ops! {
    attention {
        AttentionForward = "attention_forward",
        AttentionBackward = "attention_backward",
        SelectedForward = "selected_forward",
        BlockSparse = "block_sparse",
        BlockSparseBackward = "block_sparse_backward",
    }
    dma {
        DmaScores = "dma_scores",
        DmaScoresBackward = "dma_scores_backward",
        DmaSelect = "dma_select",
        DmaAttentionForward = "dma_attention_forward",
        DmaAttentionBackward = "dma_attention_backward",
        DmaForward = "dma_forward",
    }
    nsa {
        NsaMeanPool = "nsa_mean_pool",
        NsaMeanPoolBackward = "nsa_mean_pool_backward",
        NsaCompressedForward = "nsa_compressed_forward",
        NsaCompressedBackward = "nsa_compressed_backward",
        NsaSelectedForward = "nsa_selected_forward",
        NsaSelectedBackward = "nsa_selected_backward",
        NsaGatesBackward = "nsa_gates_backward",
        NsaForward = "nsa_forward",
    }
    chosen {
        ChooseBlocks = "choose_blocks",
        ChosenForward = "chosen_forward",
    }
    decode {
        AttentionDecode = "attention_decode",
        CachedDecode = "cached_decode",
        DmaDecode = "dma_decode",
        SelectedDecode = "selected_decode",
        MlaDecode = "mla_decode",
    }
}

/// Outputs of an op, in the order of their pointers.
type Outputs = Vec<(&'static str, CudaTensor)>;

/// The outputs of a forward pass: `o`, and unless `only_o` what the backward pass reads.
fn result(result: AttentionResult, only_o: bool) -> Outputs {
    if only_o {
        return vec![("o", result.o)];
    }
    let mut outputs = vec![("o", result.o), ("lse", result.lse)];
    outputs.extend(result.o_low.map(|o_low| ("o_low", o_low)));
    outputs.extend(result.base.map(|base| ("base", base)));
    outputs
}

/// When a forward pass also returns `o_low`, what bf16 o lacks of the f32 output: wherever a backward pass may follow,
/// which otherwise computes it once more.
fn o_low(only_o: bool) -> KeepOLow {
    if only_o { KeepOLow::Never } else { KeepOLow::Always }
}

/// The tensors of a request, and whether the op has read each.
struct Inputs {
    op: &'static str,
    tensors: Vec<(String, CudaTensor, Cell<bool>)>,
}

impl Inputs {
    /// Declares the tensors of a request to the recorder, after checking their types and sizes.
    fn new(request: &Request, gpu: &Recorder) -> Result<Self, PlanError> {
        let op = request.call.name();
        let mut tensors: Vec<(String, CudaTensor, Cell<bool>)> = Vec::new();
        for spec in &request.tensors {
            let (dtype, strides) = spec.checked(op)?;
            if tensors.iter().any(|(name, ..)| *name == spec.name) {
                return Err(wrong(op, &spec.name, "is given twice"));
            }
            tensors.push((spec.name.clone(), gpu.strided(&spec.shape, &strides, dtype), Cell::new(false)));
        }
        Ok(Self { op, tensors })
    }

    /// A tensor by name, `None` if the request lacks it; counts as read.
    fn maybe(&self, name: &str) -> Option<CudaTensor> {
        let (_, tensor, used) = self.tensors.iter().find(|(known, ..)| known == name)?;
        used.set(true);
        Some(tensor.clone())
    }

    fn get(&self, name: &str) -> Result<CudaTensor, PlanError> {
        self.maybe(name).ok_or_else(|| wrong(self.op, name, "is missing"))
    }

    fn all_used(&self) -> Result<(), PlanError> {
        match self.tensors.iter().find(|(_, _, used)| !used.get()) {
            Some((name, ..)) => Err(wrong(self.op, name, "is not an input of this op")),
            None => Ok(()),
        }
    }

    fn qkv(&self) -> Result<Qkv, PlanError> {
        Ok(Qkv::separate(&self.get("q")?, &self.get("k")?, &self.get("v")?))
    }

    /// The queries. Ops on them sum in a fixed order if `fixed_order`, else in any.
    fn q_in(&self, fixed_order: bool) -> Result<CudaTensor, PlanError> {
        let sums = if fixed_order { SumOrder::Fixed } else { SumOrder::Any };
        let policy = KernelPolicy { sums, ..KernelPolicy::DEFAULT };
        Ok(self.get("q")?.under(policy))
    }

    /// q, k and v, of whole rows or of a token a row. With `same_bits` their kernels give one row's bits in both.
    fn qkv_in_order(&self, same_bits: bool) -> Result<Qkv, PlanError> {
        let qkv = self.qkv()?;
        if !same_bits {
            return Ok(qkv);
        }
        let (shape, capability) = (qkv.shape(self.op)?, qkv.q.tensor().hardware().compute_capability);
        let refused = |what: String| {
            PlanError::Call(format!(
                "{}: same_bits needs {what}\n  hint: leave it out; last bits may differ then",
                self.op
            ))
        };
        if capability != (9, 0) {
            let (major, minor) = capability;
            return Err(refused(format!("an H100 or H200, compute capability 9.0, and this GPU has {major}.{minor}")));
        }
        let widths = [shape.head_dim, shape.head_dim_v];
        if ![[64; 2], [128; 2]].contains(&widths) {
            let [keys, values] = widths;
            return Err(refused(format!(
                "keys and values of 64 or of 128 columns, and these have {keys} and {values}"
            )));
        }
        Ok(qkv.under(KernelPolicy { sums: SumOrder::Fixed, keys: KeyOrder::Epochs, ..KernelPolicy::DEFAULT }))
    }

    fn documents(&self) -> Result<[CudaTensor; 2], PlanError> {
        Ok([self.get("doc_start")?, self.get("doc_end")?])
    }

    /// The forward pass's outputs as a backward pass reads them: o and lse are required, `o_low` and `base` may be
    /// missing.
    fn result(&self) -> Result<AttentionResult, PlanError> {
        Ok(AttentionResult {
            o: self.get("o")?,
            lse: self.get("lse")?,
            o_low: self.maybe("o_low"),
            base: self.maybe("base"),
        })
    }

    /// A backward pass over separate q, k and v: `[dq, dk, dv]` and the gradient of a bias.
    fn gradients(
        &self,
        softmax_scale: f32,
        fixed_order: bool,
        pass: impl FnOnce(AttentionGradients<'_>) -> Result<Option<CudaTensor>, KernelError>,
    ) -> Result<Outputs, PlanError> {
        let qkv = Qkv::separate(&self.q_in(fixed_order)?, &self.get("k")?, &self.get("v")?);
        let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|heads| heads.tensor());
        let [dq, dk, dv] = [q, k, v].map(|x| q.empty_contiguous(x.shape(), DType::BF16));
        let d_bias = pass(AttentionGradients {
            qkv: &qkv,
            result: &self.result()?,
            d_o: &self.get("d_o")?,
            grads: &Qkv::separate(&dq, &dk, &dv),
            softmax_scale,
        })?;
        let mut outputs = vec![("dq", dq), ("dk", dk), ("dv", dv)];
        outputs.extend(d_bias.map(|d_bias| ("d_bias", d_bias)));
        Ok(outputs)
    }
}

fn wrong(op: &'static str, tensor: &str, problem: &str) -> PlanError {
    PlanError::Tensor { op, tensor: tensor.to_owned(), problem: problem.to_owned() }
}
