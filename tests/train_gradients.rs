//! Gradients of the training loop, which runs backward segment by segment and adds up micro-batches.
use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{Tensor, TensorData};
use burn_flex::Flex;
use chacha20::ChaCha8Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use sieve_core::recipe::{ActivationCheckpointMode, ActivationCheckpointSection};
use sieve_core::{Keeping, Recipe};
use sieve_data::{Batch, IGNORE_LABEL};
use sieve_hf::{NamedTensor, named_parameters};
use sieve_nn::{LayerContext, PassSettings, PassState, Qwen3};
use sieve_train::{BlockSettings, DeviceBatch, GradientBuffer, Optimizer, accumulate_gradients_with};
use std::collections::HashMap;
use std::ops::Range;

type B = Autodiff<Flex>;

const VOCAB_SIZE: usize = 61;
const SEQ_LEN: usize = 37;
/// Weight of one token in the loss of MSA's indexers.
const TOKEN_SHARE: f64 = 0.01;

const KINDS: [&str; 15] = [
    "kind = \"mha\"",
    "kind = \"swa\"\nsliding_window = 7",
    QWEN2,
    MLA,
    "kind = \"nsa\"\ncompress_block_size = 4\ncompress_stride = 2\ncompress_hidden_size = 12\nselect_block_size = 4\n\
     num_selected_blocks = 3\nwindow_size = 5",
    "kind = \"dma\"\nkeep_window_size = 5\na_init = 0.5\nrecency = \"none\"",
    "kind = \"infllm_v2\"\ncompress_block_size = 4\ncompress_stride = 2\nselect_block_size = 4\n\
     num_selected_blocks = 3\nnum_local_blocks = 1",
    "kind = \"moba\"\nselect_block_size = 4\nnum_selected_blocks = 2",
    "kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 2",
    "kind = \"msa\"\nindexer = \"qsa\"\nselect_block_size = 4\nnum_selected_blocks = 3",
    SHARED_MSA,
    SHARED_QSA,
    SHARED_MOBA,
    SINKS,
    "kind = \"cowa\"\nsink_tokens = 2\nnear_window = 4\nfar_reach = 20",
];

/// MSA whose last two layers read the blocks that the first one chose.
const SHARED_MSA: &str = "kind = \"msa\"\nselect_block_size = 4\nnum_selected_blocks = 3";
const SHARED_QSA: &str = "kind = \"msa\"\nindexer = \"qsa\"\nselect_block_size = 4\nnum_selected_blocks = 4";
const SHARED_MOBA: &str = "kind = \"moba\"\nselect_block_size = 4\nnum_selected_blocks = 3";

/// Qwen2's form: biases in place of the norms of queries and keys.
const QWEN2: &str = "kind = \"swa\"\nsliding_window = 9";

/// Windows with sinks.
const SINKS: &str = "kind = \"swa\"\nsliding_window = 5";

/// MLA has keys and values for each head, so this model has as many KV heads as query heads.
const MLA: &str = "kind = \"mla\"\nkv_lora_rank = 20\nqk_rope_head_dim = 6";

/// A recipe of three layers whose form (biases, sinks, shared blocks) goes with `attention`.
fn recipe(attention: &str, tied: bool) -> Recipe {
    let kv_heads = if attention == MLA { 4 } else { 2 };
    let form = match attention {
        QWEN2 => "qk_norm = false\nqkv_bias = true\n",
        SINKS => "attention_sinks = true\n",
        SHARED_MSA | SHARED_QSA | SHARED_MOBA => "layer_types = [\"sparse\", \"shared\", \"shared\"]\n",
        _ => "",
    };
    let text = format!(
        "[model]\n{form}hidden_size = 48\nintermediate_size = 80\nnum_hidden_layers = 3\nnum_attention_heads = 4\n\
         num_key_value_heads = {kv_heads}\nhead_dim = 16\nmax_position_embeddings = 64\ntie_word_embeddings = {tied}\n\
         residual_scale = true\ninitializer_range = 0.2\n[attention]\n{attention}\n[tokenizer]\npath = \"none\"\n\
         [data]\npaths = [\"none\"]\n[training]\nsteps = 1\nseq_len = {SEQ_LEN}\nlocal_batch_size = 1\n\
         [optimizer]\nlr = 1e-3\n[lr_scheduler]\nwarmup_steps = 0\ndecay_ratio = 0.0\n"
    );
    Recipe::load(&text, "a test's recipe", &[]).expect("the text above is valid")
}

fn model(attention: &str, tied: bool) -> Qwen3<B> {
    let shape = recipe(attention, tied).model_shape(VOCAB_SIZE).expect("it fits");
    Qwen3::new(&shape, 5, &Default::default())
}

/// A batch of `rows` rows, each with two documents and padding without labels. The number of labels differs from row to
/// row.
fn batch(first_row: usize, rows: usize) -> Batch {
    let mut batch = Batch {
        first_sample: first_row as u64,
        batch: rows,
        seq_len: SEQ_LEN,
        tokens: Vec::new(),
        labels: Vec::new(),
        doc_start: Vec::new(),
        doc_end: Vec::new(),
        positions: Vec::new(),
        documents: Vec::new(),
    };
    for row in first_row..first_row + rows {
        let mut random = ChaCha8Rng::seed_from_u64(row as u64);
        let ends = [5 + row % 4, 12 + 3 * row, SEQ_LEN];
        let mut start = 0;
        for (number, end) in ends.into_iter().enumerate() {
            for place in start..end {
                batch.tokens.push(random.next_u32() % VOCAB_SIZE as u32);
                let has_label = number < 2 && place + 1 < end;
                let label = (random.next_u32() % VOCAB_SIZE as u32) as i32;
                batch.labels.push(if has_label { label } else { IGNORE_LABEL });
                batch.doc_start.push(start as u32);
                batch.doc_end.push(end as u32);
                batch.positions.push((place - start) as u32);
                batch.documents.push(number as u32);
            }
            start = end;
        }
    }
    batch
}

/// Loss and gradients by parameter name, computed by the trainer's segments.
fn by_segments(model: &Qwen3<B>, batches: &[Batch]) -> (f32, Vec<NamedTensor>) {
    let device = Default::default();
    let rope = model.rope(SEQ_LEN, &device);
    let num_labels: usize = batches.iter().map(Batch::num_labels).sum();
    let mut gradients = GradientBuffer::default();
    let mut loss = 0.0;
    for batch in batches {
        let batch = DeviceBatch::<B>::new(batch, &device);
        let scale = 1.0 / num_labels as f64;
        let plain = settings(ActivationCheckpointMode::None, 0..0);
        let result = accumulate_gradients_with(&plain, model, &batch, &rope, scale, &mut gradients);
        loss += result.loss.into_scalar();
    }
    (loss, gradients.named(model))
}

/// As [`by_segments`], computed by one autodiff graph over the whole model.
fn by_whole_graph(model: &Qwen3<B>, batch: &Batch) -> (f32, Vec<NamedTensor>) {
    let device = Default::default();
    let rope = model.rope(SEQ_LEN, &device);
    let on_device = DeviceBatch::<B>::new(batch, &device);
    let mut context = LayerContext::new(&on_device.documents, &rope);
    context.settings.token_share = TOKEN_SHARE;
    let x = model.hidden(on_device.tokens, &context);
    let loss = model.head.loss(x, on_device.labels, &model.embed_tokens);
    let loss = loss.mul_scalar(1.0 / batch.num_labels() as f64);
    let value = loss.clone().inner().into_scalar();
    let mut pass = loss.backward();
    let mut gradients = GradientBuffer::<B>::default();
    gradients.collect(model, &mut pass);
    (value, gradients.named(model))
}

fn values(data: &TensorData) -> Vec<f32> {
    data.to_vec().expect("f32")
}

/// Asserts that gradients are equal to the last bit, and that none of them is zero.
fn assert_same(found: &[NamedTensor], expected: &[NamedTensor], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.name, expected.name);
        assert!(values(&expected.data).iter().any(|x| *x != 0.0), "{} is zero", expected.name);
        assert!(found.data.as_bytes() == expected.data.as_bytes(), "{what}: {}", expected.name);
    }
}

/// Asserts that gradients differ by at most this share of the largest number of their tensor.
fn assert_close(found: &[NamedTensor], expected: &[NamedTensor], share: f32, what: &str) {
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.name, expected.name);
        let expected = values(&expected.data);
        let largest = expected.iter().fold(0f32, |max, x| max.max(x.abs()));
        for (a, b) in values(&found.data).iter().zip(&expected) {
            assert!((a - b).abs() <= share * largest, "{what}: {}: {a} and {b}", found.name);
        }
    }
}

#[test]
fn segments_give_the_gradients_of_the_whole_graph_to_the_bit() {
    for attention in KINDS {
        for tied in [true, false] {
            let model = model(attention, tied);
            let batch = batch(0, 3);
            let (loss, segments) = by_segments(&model, std::slice::from_ref(&batch));
            let (whole_loss, whole) = by_whole_graph(&model, &batch);
            assert_eq!(loss.to_bits(), whole_loss.to_bits(), "{attention}");
            assert_eq!(segments.len(), sieve_hf::parameter_names(&model).len());
            assert_same(&segments, &whole, &format!("{attention}, tied {tied}"));
        }
    }
}

#[test]
fn micro_batches_give_the_mean_over_all_labels() {
    for attention in KINDS {
        let model = model(attention, true);
        let parts = [batch(0, 2), batch(2, 2), batch(4, 2), batch(6, 2)];
        let counts = parts.each_ref().map(Batch::num_labels);
        assert!(counts.iter().any(|count| *count != counts[0]), "{counts:?}");
        let (split_loss, split) = by_segments(&model, &parts);
        let (whole_loss, whole) = by_segments(&model, &[batch(0, 8)]);
        assert!((split_loss - whole_loss).abs() <= 4.0 * f32::EPSILON * whole_loss);
        // The mean of the micro-batches' own means must differ, or the check above would prove nothing.
        let means = parts.iter().map(|part| by_segments(&model, std::slice::from_ref(part)).0);
        let mean_of_means = means.sum::<f32>() / 4.0;
        assert!((mean_of_means - whole_loss).abs() > 1e-5 * whole_loss);

        // The two sides add a few hundred terms in different orders.
        assert_close(&split, &whole, 64.0 * f32::EPSILON, attention);
    }
}

/// Inside its backward pass a layer adds its gradients to the sums of earlier micro-batches.
#[test]
fn further_micro_batches_are_added_to_the_last_bit() {
    use ActivationCheckpointMode::{Full, None, Selective};
    let device = Default::default();
    for attention in KINDS {
        // Untied: a tied embedding gets two gradients in each pass, so the order of the sums would differ.
        let model = model(attention, false);
        let rope = model.rope(SEQ_LEN, &device);
        let parts = [0, 2, 4].map(|row| DeviceBatch::<B>::new(&batch(row, 2), &device));
        for (mode, fp8) in [(None, 0..0), (Full, 0..0), (Selective, 0..2)] {
            let settings = settings(mode, fp8);
            let pass = |parts: &[DeviceBatch<B>]| {
                let mut gradients = GradientBuffer::default();
                for part in parts {
                    accumulate_gradients_with(&settings, &model, part, &rope, 0.01, &mut gradients);
                }
                gradients.named(&model)
            };
            let together = pass(&parts);
            let alone = parts.each_ref().map(|part| pass(std::slice::from_ref(part)));
            assert_eq!(together.len(), sieve_hf::parameter_names(&model).len());
            for (place, sum) in together.iter().enumerate() {
                let [a, b, c] = alone.each_ref().map(|part| values(&part[place].data));
                let places = a.iter().zip(&b).zip(&c);
                let expected: Vec<f32> = places.map(|((a, b), c)| a + b + c).collect();
                assert_eq!(values(&sum.data), expected, "{attention} {mode:?}: {}", sum.name);
            }
        }
    }
}

/// If every step has the same gradient, AdamW's bias-corrected moments are that gradient and its square, so that each
/// update moves a weight by the learning rate.
#[test]
fn updates_by_one_gradient_move_every_weight_by_the_rate() {
    let (device, rate) = (Default::default(), 1e-2);
    let mut settings = recipe(KINDS[0], true).optimizer;
    settings.weight_decay = 0.0;
    let start = model(KINDS[0], true);
    let mut optimizer = Optimizer::<B>::new(settings, start.shape());
    let rope = start.rope(SEQ_LEN, &device);
    let batch = DeviceBatch::<B>::new(&batch(0, 2), &device);
    let gradients = || {
        let mut gradients = GradientBuffer::default();
        accumulate_gradients_with(&BlockSettings::default(), &start, &batch, &rope, 0.1, &mut gradients);
        gradients
    };
    let mut moved = start.clone();
    for updates in 1..=3 {
        moved = optimizer.step(moved, &mut gradients(), Tensor::ones([1], &device), rate);
        let named = gradients().named(&start).into_iter();
        let mut num_large = 0;
        for ((gradient, before), after) in named.zip(named_parameters(&start)).zip(named_parameters(&moved)) {
            let name = &gradient.name;
            let weights = values(&before.data).into_iter().zip(values(&after.data));
            for (gradient, (before, after)) in values(&gradient.data).into_iter().zip(weights) {
                // For smaller gradients AdamW's epsilon matters.
                if gradient.abs() > 1e-2 {
                    num_large += 1;
                    let expected = before - (f64::from(updates) * rate) as f32 * gradient.signum();
                    let close = (after - expected).abs() < 2e-6;
                    assert!(close, "{name}, update {updates}: {before} to {after}");
                }
            }
        }
        assert!(num_large > 1000, "{num_large}");
    }
}

/// A zero tensor for each matrix of a module, by parameter id.
struct Zeros(HashMap<ParamId, Tensor<B, 2>>);

impl ModuleVisitor<B> for Zeros {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Ok(shape) = <[usize; 2]>::try_from(param.val().dims().as_slice()) {
            self.0.insert(param.id, Tensor::zeros(shape, &Default::default()));
        }
    }
}

#[test]
fn layers_take_the_sums_that_their_backward_pass_adds_to() {
    let device = Default::default();
    // Of the first six kinds: four sums where attention's two projections take theirs, two where only the MLP's do.
    for (attention, taken) in KINDS.into_iter().zip([4, 4, 2, 2, 2, 4]) {
        let model = model(attention, true);
        let batch = DeviceBatch::<B>::new(&batch(0, 2), &device);
        let rope = model.rope(SEQ_LEN, &device);
        let mut zeros = Zeros(HashMap::new());
        model.layers[0].visit(&mut zeros);
        let (before, context) = (zeros.0.len(), LayerContext::new(&batch.documents, &rope));
        let mut state = PassState { sums: zeros.0, ..PassState::default() };
        model.layers[0].forward(model.embed_tokens.forward(batch.tokens), &context, &mut state, None);
        assert_eq!(before - state.sums.len(), taken, "{attention}");
    }
}

#[test]
fn a_dense_step_has_the_gradients_of_dense_attention() {
    let dense = computed(&model(KINDS[0], true), &BlockSettings::default());
    for attention in [KINDS[6], KINDS[7], SHARED_MOBA] {
        let model = model(attention, true);
        for mode in [ActivationCheckpointMode::None, ActivationCheckpointMode::Full] {
            let of = |reads_all: bool| {
                let mut settings = settings(mode, 0..0);
                settings.layers.reads_all = reads_all;
                computed(&model, &settings)
            };
            let (loss, gradients, _) = of(true);
            let [loss, expected, chosen] = [loss, dense.0, of(false).0].map(f32::from_bits);
            assert!((loss - expected).abs() < 1e-5 * expected, "{attention}: {loss}, {expected}");
            // Three chosen blocks hold all keys of these short documents, so the loss is the dense one. `chosen` is of
            // two blocks, which do not hold all keys, so it must differ.
            assert!(attention != KINDS[7] || chosen != expected, "{attention}: {chosen}");
            // The dense model computes half a block in one op, and the other kinds in several, so that rounding
            // differs.
            assert_close(&gradients, &dense.1, 1e-4, attention);
        }
    }
}

fn settings(mode: ActivationCheckpointMode, fp8: Range<usize>) -> BlockSettings {
    let checkpointing = ActivationCheckpointSection { mode, ..Default::default() };
    let layers = PassSettings { token_share: TOKEN_SHARE, ..PassSettings::default() };
    BlockSettings { checkpointing, fp8, layers }
}

/// Bits of the loss, gradients, and DMA's masks, for blocks computed with `settings`.
fn computed(model: &Qwen3<B>, settings: &BlockSettings) -> (u32, Vec<NamedTensor>, Vec<TensorData>) {
    let device = Default::default();
    let rope = model.rope(SEQ_LEN, &device);
    let batch = batch(0, 3);
    let scale = 1.0 / batch.num_labels() as f64;
    let batch = DeviceBatch::<B>::new(&batch, &device);
    let mut gradients = GradientBuffer::default();
    let result = accumulate_gradients_with(settings, model, &batch, &rope, scale, &mut gradients);
    let loss = result.loss.into_data().iter::<f32>().next().expect("a loss");
    let expire = result.expire.into_iter().map(|mask| mask.into_data());
    (loss.to_bits(), gradients.named(model), expire.collect())
}

#[test]
fn recomputing_blocks_or_keeping_more_changes_no_bit_of_a_gradient() {
    use ActivationCheckpointMode::{Full, None, Selective};
    let keeps = |mode| {
        let mut settings = settings(mode, 0..0);
        settings.layers.keeping = Keeping::ALL;
        settings
    };
    let few = [Selective, Full].map(|mode| settings(mode, 0..0));
    let all = [few.to_vec(), [None, Selective, Full].map(keeps).to_vec()].concat();
    for attention in KINDS {
        let model = model(attention, true);
        let (loss, gradients, masks) = computed(&model, &settings(None, 0..0));
        assert_eq!(gradients.len(), sieve_hf::parameter_names(&model).len());
        for settings in &all {
            let (other_loss, other, other_masks) = computed(&model, settings);
            assert_eq!(loss, other_loss, "{attention} {settings:?}");
            assert_eq!(masks, other_masks, "{attention} {settings:?}");
            assert_same(&other, &gradients, &format!("{attention} {settings:?}"));
        }
    }
}

#[test]
fn eight_bit_blocks_are_near_and_recomputed_to_the_last_bit() {
    use ActivationCheckpointMode::{None, Selective};
    for attention in KINDS {
        let model = model(attention, true);
        let of = |mode, fp8| computed(&model, &settings(mode, fp8));
        let (plain_loss, plain, _) = of(None, 0..0);
        let (loss, gradients, _) = of(None, 0..2);
        let (again_loss, again, _) = of(Selective, 0..2);
        assert_eq!(loss, again_loss, "{attention}");
        let off = f32::from_bits(loss) / f32::from_bits(plain_loss) - 1.0;
        assert!(off != 0.0 && off.abs() < 2e-2, "{attention}: {off}");
        let (mut error, mut norm) = (0.0, 0.0);
        for ((plain, one), again) in plain.iter().zip(&gradients).zip(&again) {
            assert_eq!(one.data.as_bytes(), again.data.as_bytes(), "{attention} {}", one.name);
            for (a, b) in values(&one.data).iter().zip(values(&plain.data)) {
                error += f64::from(a - b).powi(2);
                norm += f64::from(b).powi(2);
            }
        }
        let relative = (error / norm).sqrt();
        assert!(relative > 1e-4 && relative < 0.5, "{attention}: {relative}");
    }
}

#[test]
fn blocks_at_the_ends_keep_the_type_of_their_tensors() {
    use ActivationCheckpointMode::None;
    let model = model(KINDS[0], true);
    let loss = |fp8| computed(&model, &settings(None, fp8)).0;
    let plain = loss(0..0);
    assert_eq!(loss(2..2), plain);
    assert_ne!(loss(1..2), plain);
}
