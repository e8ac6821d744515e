//! A model of each kind of attention becomes one of each other kind.
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flex::Flex;
use sieve_core::model::Conversion;
use sieve_core::model::test_shapes::{tiny_dma, tiny_nsa, with_keys};
use sieve_core::recipe::AttentionKind;
use sieve_core::{Attention, DmaShape, ModelShape};
use sieve_hf::{load_converted, named_parameters};
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::Documents;

/// A kind that reads all keys of a row of [`ROW`] tokens and adds nothing to a logit; NSA has no such form.
fn of_whole_rows(kind: AttentionKind) -> Attention {
    match kind {
        AttentionKind::Mha | AttentionKind::Mla => kind.example(),
        AttentionKind::Nsa => tiny_nsa().attention,
        AttentionKind::Swa => Attention::swa(ROW),
        AttentionKind::Dma => Attention::Dma(DmaShape::published(ROW)),
        _ => with_keys(
            kind.example(),
            &[
                ("compress_block_size", 4),
                ("compress_stride", 2),
                ("select_block_size", 4),
                ("num_selected_blocks", 16),
                ("num_local_blocks", 8),
            ],
        ),
    }
}

const ROW: usize = 21;

fn shape_of(kind: AttentionKind) -> ModelShape {
    let shape = ModelShape { head_dim: 8, residual_scale: false, attention: of_whole_rows(kind), ..tiny_dma() };
    match kind {
        AttentionKind::Mla => ModelShape { num_kv_heads: shape.num_heads, ..shape },
        _ => shape,
    }
}

fn logits(model: &Qwen3<Flex>) -> TensorData {
    let device = Default::default();
    let tokens = (0..ROW).map(|token| (token * 7 % 50) as i32).collect::<Vec<_>>();
    let tokens = Tensor::<Flex, 2, Int>::from_data(TensorData::new(tokens, [1, ROW]), &device);
    let documents = Documents::whole_rows([1, ROW], &device);
    let rope = model.rope(ROW, &device);
    model.logits(tokens, &LayerContext::new(&documents, &rope)).into_data()
}

fn converted(from: &Qwen3<Flex>, conversion: &Conversion, to: &ModelShape) -> Qwen3<Flex> {
    let tensors = named_parameters(from);
    load_converted(Qwen3::new(to, 3, &Default::default()), conversion, DType::F32, &mut |name, _| {
        let found = tensors.iter().find(|tensor| tensor.name == name);
        found.map(|tensor| tensor.data.clone()).ok_or(name.to_owned())
    })
    .expect("the conversion keeps it or adds it")
}

/// All ordered pairs of kinds. A model becomes a model of another kind, with equal logits where both kinds read all
/// keys; or the conversion is refused.
#[test]
fn of_72_pairs_of_kinds_42_begin_with_equal_logits_14_with_others_and_16_are_refused() {
    let (mut equal, mut other, mut refused) = (0, 0, 0);
    for from in AttentionKind::ALL {
        let source = Qwen3::<Flex>::new(&shape_of(from), 7, &Default::default());
        let before = logits(&source);
        for to in AttentionKind::ALL.into_iter().filter(|to| *to != from) {
            let pair = format!("{} to {}", from.name(), to.name());
            let is_latent = [from, to].contains(&AttentionKind::Mla);
            let target = shape_of(to);
            let conversion = match Conversion::of(&shape_of(from), &target) {
                Ok(conversion) => conversion,
                Err(gap) => {
                    assert!(is_latent && gap.to_string().contains("from a latent"), "{pair}: {gap}");
                    refused += 1;
                    continue;
                }
            };
            assert!(!is_latent, "{pair}");
            let made = converted(&source, &conversion, &target);
            let difference = largest_difference(&before, &logits(&made));
            if [from, to].contains(&AttentionKind::Nsa) {
                assert!(difference > 1e-5 && difference.is_finite(), "{pair}: {difference}");
                other += 1;
            } else {
                assert!(difference <= 1e-5, "{pair}: {difference}");
                equal += 1;
            }
            // A tensor that both models have keeps its values; the former model's other tensors are gone.
            let kept = named_parameters(&made).into_iter().filter(|tensor| !conversion.adds(&tensor.name));
            let before = named_parameters(&source);
            let mut num_kept = 0;
            for tensor in kept {
                let found = before.iter().find(|of| of.name == tensor.name).expect("kept");
                assert_eq!(found.data, tensor.data, "{pair}: {}", tensor.name);
                num_kept += 1;
            }
            assert_eq!(num_kept + conversion.dropped.len(), before.len(), "{pair}");
        }
    }
    assert_eq!([equal, other, refused], [42, 14, 16]);
}

fn largest_difference(a: &TensorData, b: &TensorData) -> f32 {
    let pairs = a.iter::<f32>().zip(b.iter::<f32>());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, |most, next| if next <= most { most } else { next })
}
