//! MLA on the CPU: attention in f32 takes the kernels of `sieve-cpu`, any other dtype the reference; packing is plain
//! Burn operations. The functions implement methods of `DeviceBackend`.
use super::{MlaCall, MlaSpec, reference};
use crate::AttentionOutput;
use crate::attention::cpu::{backward, forward, shape_of};
use crate::device::{contiguous, unless_f32};
use burn::tensor::TensorMetadata;
use burn_flex::{Flex, FlexTensor};
use sieve_cpu::{Mask, ScaledShape};

pub(crate) use super::reference::{mla_pack, mla_pack_backward};

/// Sizes of the packed tensor, in terms of attention whose values are narrower than its keys.
fn packed_shape(packed: &FlexTensor, spec: MlaSpec) -> ScaledShape {
    let dims = packed.shape();
    let attention = spec.attention();
    let dims = [dims[0], dims[1], attention.packed_heads(), spec.key_dim()];
    shape_of(dims, attention).with_value_width(spec.head_dim)
}

pub(crate) fn mla_attention(packed: FlexTensor, call: &MlaCall<Flex>) -> AttentionOutput<Flex> {
    unless_f32!(&packed, call.spec.num_heads, "mla_attention": reference::mla_attention::<Flex>(packed, call));
    let packed = contiguous(packed);
    let shape = packed_shape(&packed, call.spec);
    forward(&packed, shape, Mask::Causal, &call.documents)
}

/// The gradient of the packed tensor, in its layout; values are narrower than keys. Of `output` only o and lse are
/// read.
pub(crate) fn mla_attention_backward(
    packed: FlexTensor,
    call: &MlaCall<Flex>,
    output: AttentionOutput<Flex>,
    d_o: FlexTensor,
) -> FlexTensor {
    unless_f32!(&packed, call.spec.num_heads, "mla_attention_backward":
        reference::mla_attention_backward::<Flex>(packed, call, output, d_o));
    let packed = contiguous(packed);
    let shape = packed_shape(&packed, call.spec);
    let (operands, d_delta) = ([output.o, output.lse, d_o], None);
    backward(&packed, shape, Mask::Causal, &call.documents, operands, d_delta)
}
