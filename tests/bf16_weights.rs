//! On the CPU, `--dtype bf16` keeps the weights of GEMMs in bf16. Such a model computes the same as an f32 model whose
//! weights were rounded to bf16; where the CPU has `vdpbf16ps`, up to the rounding of the GEMMs' inputs to bf16.
use crate::random_model::{
    export_options, generated, greedy, kinds, max_difference, random_model, recipe, tokens, write_checkpoint,
};
use burn::tensor::{DType, TensorData};
use burn_flex::Flex;
use sieve_hf::{ExportDtype, Kept, export, load_model, load_parameters, named_parameters};
use sieve_infer::{BatchGenerator, Generator, Selection, logits};
use sieve_nn::Qwen3;
use sieve_select::LayerSelectors;
use std::path::Path;

const LEN: usize = 48;

/// Whether GEMMs with bf16 weights round their inputs to bf16 on this CPU.
fn inputs_are_rounded() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn read(folder: &Path, kept: Kept) -> Qwen3<Flex> {
    let loaded = load_model::<Flex>(folder, &Default::default(), kept);
    loaded.expect("just written").model
}

/// An f32 copy of a model with bf16 weights, with the same values.
fn widened(model: &Qwen3<Flex>) -> Qwen3<Flex> {
    let mut tensors = named_parameters(model).into_iter();
    load_parameters(Qwen3::new(model.shape(), 0, &Default::default()), DType::F32, &mut |name, _| {
        let tensor = tensors.next().filter(|tensor| tensor.name == name).ok_or("another order")?;
        Ok::<_, &str>(tensor.data.convert_dtype(DType::F32))
    })
    .expect("the same parameters")
}

fn values(data: TensorData) -> Vec<f32> {
    data.to_vec().expect("f32")
}

fn median_difference(a: &[f32], b: &[f32]) -> f32 {
    let mut differences: Vec<f32> = a.iter().zip(b).map(|(a, b)| (a - b).abs()).collect();
    differences.sort_by(f32::total_cmp);
    differences[differences.len() / 2]
}

#[test]
fn logits_and_tokens_are_those_of_the_rounded_weights_in_f32() {
    for [kind, model_lines, attention] in kinds() {
        let recipe = recipe(model_lines, attention);
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoint = write_checkpoint(folder.path(), &recipe, &random_model(&recipe, 1));
        let model = read(&checkpoint.path, Kept::Bf16Weights);
        let parameters = named_parameters(&model);
        let numbers = |dtype| -> usize {
            let of_type = parameters.iter().filter(|tensor| tensor.data.dtype == dtype);
            of_type.map(|tensor| tensor.data.num_elements()).sum()
        };
        assert!(numbers(DType::BF16) > 4 * numbers(DType::F32), "{kind}: what is f32 is small");
        let wide = widened(&model);
        let (tokens, device) = (tokens(LEN, 1), Default::default());
        let [of_model, of_wide, unrounded] = [&model, &wide, &read(&checkpoint.path, Kept::All(DType::F32))]
            .map(|model| values(logits(model, &tokens, &device).expect("tokens of the vocabulary")));
        let largest = of_wide.iter().fold(0.0, |largest: f32, logit| largest.max(logit.abs()));
        // Rounded inputs may swap chosen blocks of keys, which changes some tokens' logits by more than rounding.
        let (difference, tolerance) = if inputs_are_rounded() {
            (median_difference(&of_model, &of_wide), 2e-2)
        } else {
            (max_difference(&of_model, &of_wide), 1e-5)
        };
        assert!(difference <= tolerance * largest, "{kind}: {difference} of {largest}");
        assert!(max_difference(&of_model, &unrounded) > 1e-4 * largest, "{kind}: nothing was rounded");
        for prompt in [1, 20] {
            let [alone, expected] = [&model, &wide].map(|model| generated(model, &tokens[..prompt], greedy(24)));
            // Rounded inputs may swap tokens that are almost equally likely.
            assert!(inputs_are_rounded() || alone == expected, "{kind}, prompt {prompt}: {alone:?}, {expected:?}");
            let together = BatchGenerator::new(&model, &tokens[..prompt], greedy(24), 3, &device).expect("it fits");
            for (at, step) in together.enumerate() {
                assert_eq!(step.expect("finite"), [Some(alone[at]); 3], "{kind}, prompt {prompt}, {at}");
            }
        }
    }
}

#[test]
fn selectors_and_decode_methods_choose_as_with_the_rounded_weights_in_f32() {
    let [_, model_lines, attention] = kinds()[0];
    let recipe = recipe(model_lines, attention);
    let folder = tempfile::tempdir().expect("a folder");
    let checkpoint = write_checkpoint(folder.path(), &recipe, &random_model(&recipe, 2));
    let model = read(&checkpoint.path, Kept::Bf16Weights);
    let (wide, tokens) = (widened(&model), tokens(30, 3));
    for selector in [
        "snapkv:window=2,capacity=8",
        "quest:page=4,budget=8,dense_layers=0",
        "h2o:heavy=4,recent=4",
        "meanpool:block=8,min_prefill_tokens=0",
    ] {
        let [text, expected] = [&model, &wide].map(|model| -> Vec<u32> {
            let selectors = LayerSelectors::parse(selector).expect("valid");
            let selection = Selection::new(selectors, model.shape()).expect("it fits");
            let generator = Generator::new(model, &tokens, greedy(16), &Default::default()).expect("it fits");
            let generator = generator.with_selection(selection);
            generator.collect::<Result<_, _>>().expect("finite")
        });
        if inputs_are_rounded() {
            // Rounded inputs may swap tokens that are almost equally likely, and all tokens behind them.
            assert_eq!(text[0], expected[0], "{selector}")
        } else {
            assert_eq!(text, expected, "{selector}")
        }
    }
}

#[test]
fn an_export_is_read_as_its_checkpoint_and_one_in_bf16_loses_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["swa", "llama"] {
        let kind = kinds().into_iter().find(|[kind, ..]| *kind == name);
        let [_, model_lines, attention] = kind.expect("a kind");
        let recipe = recipe(model_lines, attention);
        let checkpoint = write_checkpoint(&folder.path().join(name), &recipe, &random_model(&recipe, 1));
        let exported = |dtype, at: &str| {
            let out = folder.path().join(format!("{name}-{at}"));
            export(&checkpoint, &out, &export_options(dtype)).expect("written");
            out
        };
        let of_checkpoint = named_parameters(&read(&checkpoint.path, Kept::Bf16Weights));
        let of_export = named_parameters(&read(&exported(ExportDtype::F32, "f32"), Kept::Bf16Weights));
        for (a, b) in of_checkpoint.iter().zip(&of_export) {
            assert_eq!((&a.name, &a.data), (&b.name, &b.data), "{name}");
        }
        let out = exported(ExportDtype::Bf16, "bf16");
        let [rounded, whole] =
            [Kept::Bf16Weights, Kept::All(DType::F32)].map(|kept| named_parameters(&read(&out, kept)));
        for (a, b) in rounded.into_iter().zip(whole) {
            assert_eq!((a.name, a.data.convert_dtype(DType::F32)), (b.name, b.data), "{name}");
        }
    }
}
