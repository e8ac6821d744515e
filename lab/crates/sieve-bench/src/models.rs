//! Checks small models of every kind of attention on a device against the CPU in f64: a training step, and decoding
//! through the cache.
//!
//! This checks how models call the ops: documents, which parameter a gradient belongs to, caches, optimizers,
//! recomputation, fp8, sums in a fixed order. The checks of launch wrappers cover each kernel's own results.
mod fp8;

use crate::attention::repeat;
use crate::error::{BenchError, Result};
use crate::extent::CheckPart;
use crate::extent::Extent;
use crate::report::{Outcome, PathWatch, Report, Wrong, wrong};
use crate::tensors::table_type;
use crate::tolerance::{RowTolerance, Tolerance, row_norms};
use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_flex::{Flex, FlexDevice};
use sieve_core::recipe::{ActivationCheckpointMode, OptimizerName};
use sieve_core::{KeyOrder, ModelShape, Recipe, TokenKeys};
use sieve_hf::{NamedTensor, load_parameters, named_parameters};
use sieve_kernels::step::require_fp8;
use sieve_kernels::{Cublaslt, DeviceReport, KernelPolicy, NeededKernels, SumOrder};
use sieve_nn::{KvCache, LayerCache, LayerContext, LayerOperands, Qwen3, RecentCache, TextRows};
use sieve_ops::{
    DeviceBackend, Documents, IGNORE_LABEL, RotaryEmbedding, SelectorCache, TrainBackend, selector_decode,
};
use sieve_testing::{Random, cases, round_bf16};
use sieve_train::{BlockSettings, DeviceBatch, GradientBuffer, Optimizer, accumulate_gradients_with};
use std::convert::Infallible;

const LAYERS: usize = 2;
const ROWS: usize = 2;
const SEQ_LEN: usize = 96;
pub(crate) const VOCAB_SIZE: usize = 331;

/// Tokens of the prefill; the others are decoded one by one.
const PREFILLED: usize = 37;

/// The first token whose rotary tables are longer, with the same cache.
const LONGER_FROM: usize = 48;

/// Prompts of texts of different lengths that are decoded together. The third begins when the first has ended.
const PROMPTS: [usize; 3] = [63, PREFILLED, 50];

/// The token before which the first of these texts is kept until the others have ended.
const PAUSED_AT: usize = 90;

/// Rows that the common cache begins with, and tokens of each: it grows to a third row, and to [`SEQ_LEN`].
const FIRST_ROWS: [usize; 2] = [2, 64];

/// The token from which on another thread decodes: in the middle of the row, with the cache that this thread filled; or
/// the first one, so that the other thread does all.
const MOVED_AT: [usize; 2] = [72, 0];

/// Choices of keys under which a dense model decodes on a GPU. Each has room for all keys, so the logits must be those
/// of dense attention. Choices of fewer keys are checked with the launch wrappers.
const ALL_KEYS: [TokenKeys; 4] = [
    TokenKeys::Ends { first: SEQ_LEN - 7, last: 7 },
    TokenKeys::Pages { page: 16, count: 6 },
    TokenKeys::Pages { page: 8, count: 20 },
    TokenKeys::Largest(SEQ_LEN),
];

/// Learning rate of the checked update; so large that the update survives the weight's rounding to bf16.
const LEARNING_RATE: f64 = 0.5;

/// AdamW's epsilon, about as large as the gradients. With a small one the update is nearly the gradient's sign, which
/// rounding decides for the smallest gradients.
const EPSILON: f64 = 1e-3;

/// Epsilon of the models' norms, about the mean square of an embedding's row. With the usual 1e-6 a norm that leaves
/// its epsilon out would be within the tolerance of bf16.
const NORM_EPSILON: f64 = 1e-2;

/// Added tolerance of kinds that choose keys, as a share of the norm of all rows and of one row: in bf16 two keys of
/// nearly equal score may change places, and a query then reads another key.
const OF_A_CHOICE: [f64; 2] = [0.1, 1.0];

/// The checked models: name (which says whether they have sinks), part of the check ([`part_of`]), how queries find
/// keys (neighbours, chosen, or all biased), and the recipe's `[attention]` section. "all biased": DMA's window holds
/// every key, so attention takes the dense kernels with a bias. The first model is the plain dense one, with which
/// selectors decode too.
const KINDS: &str = r"
    mha => attention => neighbours => kind = 'mha'
    mha, one layer without RoPE => attention => neighbours => rope_layers = [true, false]\n[attention]\nkind = 'mha'
    swa => attention => neighbours => kind = 'swa'\nsliding_window = 16
    mha with sinks => attention => neighbours => kind = 'mha'
    swa with sinks => attention => neighbours => kind = 'swa'\nsliding_window = 16
    cowa => bands => neighbours => kind = 'cowa'\nsink_tokens = 3\nnear_window = 12\nfar_reach = 60\nnum_bands = 2
    dma as published => attention => chosen => kind = 'dma'\npreset = 'paper'\nkeep_window_size = 24
    dma => attention => chosen => kind = 'dma'\nkeep_window_size = 24\nbias = 'linear'\nrecency = 'slope'\n\
        local_window_size = 3
    dma of all keys => attention => all biased => kind = 'dma'\npreset = 'paper'\nkeep_window_size = 400
    nsa => blocks => chosen => kind = 'nsa'\ncompress_block_size = 16\ncompress_stride = 8\n\
        compress_hidden_size = 24\nselect_block_size = 16\nnum_selected_blocks = 4\nwindow_size = 24
    mla => latents => neighbours => kind = 'mla'\nkv_lora_rank = 96\nqk_rope_head_dim = 32
    infllm_v2 => blocks => chosen => kind = 'infllm_v2'\ncompress_block_size = 16\ncompress_stride = 8\n\
        select_block_size = 16\nnum_selected_blocks = 4\nnum_local_blocks = 1
    moba => blocks => chosen => kind = 'moba'\nselect_block_size = 16\nnum_selected_blocks = 4
    moba in blocks of 128 => blocks => chosen => kind = 'moba'\nselect_block_size = 128\nnum_selected_blocks = 1
    msa => blocks => chosen => kind = 'msa'\nselect_block_size = 16\nnum_selected_blocks = 4\nnum_local_blocks = 2
    msa with QSA's scores => blocks => chosen => kind = 'msa'\nindexer = 'qsa'\nselect_block_size = 16\n\
        num_selected_blocks = 4
";

/// A row of [`KINDS`]: name, part of the check, how queries find keys, `[attention]` section, behind further keys of
/// `[model]` if there are some.
type Kind = [&'static str; 4];

/// Query heads, KV heads and head width of a model. A row's name says them where they differ from [`USUAL`].
type HeadSizes = [usize; 3];

const USUAL: HeadSizes = [4, 2, 64];

/// Second sizes of the kinds of [`CheckPart::Attention`]: an odd group and wide heads.
const WIDE: HeadSizes = [3, 1, 128];

/// A way to compute the blocks of a training step: the suffix of a result's name, and a change of the settings.
type Form = (&'static str, fn(&mut BlockSettings));

/// Forms of a model beside the default one; the same tolerance holds for their gradients.
const FORMS: [Form; 3] = [
    (", in the order of steps", |settings| {
        settings.layers.policy = KernelPolicy { keys: KeyOrder::Epochs, ..settings.layers.policy };
    }),
    (", recomputed", |settings| {
        settings.checkpointing.mode = ActivationCheckpointMode::Full;
    }),
    (", recomputable activations kept", |settings| settings.layers.keeping.recomputable = true),
];

/// Tolerance of a bf16 loss in nats, besides twice the error of the plain bf16 computation.
const LOSS_TOLERANCE: f32 = 5e-3;

/// Added tolerance of a row of a weight's gradient, as a share of the row's norm; the norm of all rows has none of it.
/// A model has some 2,800 such rows, and a row's error may be three times that of another bf16 computation by chance.
/// In 270 of 366,036 rows (22 seeds, six models), some in each seed, the error of PyTorch's bf16 gradients is over
/// twice the plain error and 1/128 of the row, by up to 0.0214 of the row; f64 gradients of the same inputs are exact.
const OF_A_ROW: f64 = 3.0 / 128.0;

/// Tolerance of the gradient of DMA's `a` where nothing is masked, as a share of its norm. Each query's gradients of
/// the biases add up to zero there, so that gradient is mostly rounding.
const CANCELLING_SHARE: f64 = 0.15;

/// A result of a model: name, width of a row, values.
type Found = (String, usize, Vec<f32>);

/// Sizes, weights and tokens of one model, the same on every backend.
#[derive(Clone)]
struct Setup {
    recipe: Recipe,
    shape: ModelShape,
    /// Initial weights, exact in bf16.
    weights: Vec<NamedTensor>,
    tokens: Vec<i32>,
    labels: Vec<i32>,
    /// First position and end of each token's document.
    bounds: [Vec<u32>; 2],
}

/// A device, the type in which a model computes there, and which kernels it takes.
pub(crate) struct On<'a, B: TrainBackend> {
    pub(crate) device: &'a B::Device,
    pub(crate) dtype: DType,
    pub(crate) policy: KernelPolicy,
}

/// Whether a GPU and its libraries have GEMMs in fp8.
pub(crate) fn has_fp8(gpu: &DeviceReport) -> bool {
    Cublaslt::require().and_then(|()| require_fp8((gpu.major, gpu.minor))).is_ok()
}

/// Checks the models of a part on a backend that computes in `dtype`: the CPU in f32, a GPU in bf16. `with_fp8` also
/// compares fp8 gradients with the CPU's.
///
/// # Errors
/// A recipe of [`KINDS`] that does not parse.
pub(crate) fn check<B: TrainBackend>(
    report: &mut Report,
    (device, dtype): (&B::Device, DType),
    (part, with_fp8): (CheckPart, bool),
    extent: &Extent,
) -> Result<()> {
    let (is_bf16, policy) = (dtype == DType::BF16, extent.policy);
    let on = On::<B> { device, dtype, policy };
    let models: Vec<(Kind, HeadSizes)> = of_part(part).collect();
    let setups = models.iter().map(|(kind, sizes)| Setup::draw(kind, *sizes, extent.seed));
    let setups = setups.collect::<Result<Vec<Setup>>>()?;
    // Threads of their own compute what the results are compared with, while the device computes these.
    let beside = |setup: &Setup| {
        std::thread::spawn({
            let setup = setup.clone();
            move || setup.references()
        })
    };
    let references: Vec<_> = setups.iter().map(beside).collect();
    for (((kind, sizes), setup), references) in models.into_iter().zip(setups).zip(references) {
        let watch = PathWatch::start();
        let (usual, model) = setup.run(&setup.model::<B>(DType::F32, device), &on);
        let forms = FORMS.map(|(form, set)| (form, setup.gradients(&model, &on, set).0));
        // On the CPU sums have one order.
        let repeated = is_bf16.then(|| {
            let fixed = KernelPolicy { sums: SumOrder::Fixed, ..policy };
            let fixed = On { policy: fixed, ..on };
            repeat(|| Ok::<_, Wrong>(setup.gradients(&model, &fixed, |_| {}).0))
        });
        let in_fp8 = (with_fp8 && fp8::COMPARED.contains(&kind[0])).then(|| setup.in_fp8(&model, &on));
        let reference = watch.reference();
        // Not watched: a CUDA graph takes no weights of another thread, so kernels are launched one by one there.
        let decoder = model.valid();
        let moved = MOVED_AT.map(|at| (at, setup.through_the_cache(&decoder, on.dtype, device, at)));
        let [exact, plain] = references.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let (name, path) = (model_name(&kind, sizes), if is_bf16 { "kernel" } else { "cpu" });
        let mut add = |case: &str, outcome: Outcome| {
            let case = format!("{case}, seed {}", extent.seed);
            report.add_call(&name, path, reference.as_deref(), &case, outcome);
        };
        for (form, own) in [("", usual)].into_iter().chain(forms) {
            for ((own, exact), plain) in own.iter().zip(&exact).zip(&plain) {
                add(&format!("{}{form}", own.0), judge(&kind, is_bf16, [&own.2, &plain.2], exact));
            }
        }
        let [plain, exact] = [&plain, &exact].map(|found| found.last().expect("logits through the cache"));
        for (at, own) in moved {
            let case = format!("logits through the cache, another thread from token {at} on");
            add(&case, own.and_then(|own| judge(&kind, is_bf16, [&own, &plain.2], exact)));
        }
        let is_plain = cases(KINDS).first() == Some(&kind);
        let selectors = ALL_KEYS.iter().filter(|_| is_bf16 && is_plain);
        for (keys, in_one_call) in selectors.flat_map(|&keys| [(keys, false), (keys, true)]) {
            let form = if in_one_call { "one call a token" } else { "a call for each layer" };
            let case = format!("logits under a selector, {keys:?}, {form}");
            let own = setup.under_selector(&decoder, on.dtype, device, (keys, in_one_call));
            add(&case, own.and_then(|own| judge(&kind, is_bf16, [&own, &plain.2], exact)));
        }
        let (texts, calls) = setup.in_rows(&decoder, on.dtype, device);
        for (prompt, own) in PROMPTS.into_iter().zip(texts) {
            let case = format!("logits of a text in a row, {prompt} tokens before, {calls}");
            let decoded = (prompt + 1 - PREFILLED) * VOCAB_SIZE..;
            let exact = (case.clone(), VOCAB_SIZE, exact.2[decoded.clone()].to_vec());
            add(&case, judge(&kind, is_bf16, [&own, &plain.2[decoded]], &exact));
        }
        for (case, outcome) in [("fixed order, repeated", repeated), ("fp8", in_fp8)] {
            outcome.into_iter().for_each(|outcome| add(case, outcome));
        }
    }
    Ok(())
}

/// Every specialisation that the models of a part launch.
pub(crate) fn needed_kernels(part: CheckPart, gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::default();
    for (kind, sizes) in of_part(part) {
        for order in [SumOrder::Any, SumOrder::Fixed] {
            // A recipe whose kernels cannot be listed gets them compiled at first use.
            let recipe = recipe(&kind, sizes).and_then(|mut recipe| {
                recipe.training.deterministic = order == SumOrder::Fixed;
                sieve_plan::needed_kernels(Some(&recipe), &gpu.arch()).map_err(BenchError::Refused)
            });
            list.extend(recipe.unwrap_or_default());
        }
    }
    list
}

/// Whether query heads of a row's model have sinks.
fn has_sinks(kind: &Kind) -> bool {
    kind[0].ends_with(" with sinks")
}

/// The part of the check that a row of [`KINDS`] belongs to.
fn part_of(kind: &Kind) -> CheckPart {
    match kind[1] {
        "attention" => CheckPart::Attention,
        "bands" => CheckPart::Bands,
        "blocks" => CheckPart::Nsa,
        "latents" => CheckPart::Mla,
        other => unreachable!("{other}: no part"),
    }
}

/// The models of a part of the check, each at the head sizes to check.
fn of_part(part: CheckPart) -> impl Iterator<Item = (Kind, HeadSizes)> {
    let is_of_part = move |kind: &Kind| match part {
        CheckPart::All => true,
        CheckPart::Attention | CheckPart::Bands | CheckPart::Nsa | CheckPart::Mla => part_of(kind) == part,
        CheckPart::Sinks => has_sinks(kind),
        CheckPart::Sparse | CheckPart::KeyOrder | CheckPart::BlockOrder => false,
    };
    let kinds = cases(KINDS).into_iter().filter(is_of_part);
    let sizes = |kind: Kind| match part_of(&kind) {
        CheckPart::Attention => vec![(kind, USUAL), (kind, WIDE)],
        // Each query head has a key of its own.
        CheckPart::Mla => vec![(kind, [4, 4, 64])],
        _ => vec![(kind, USUAL)],
    };
    kinds.flat_map(sizes)
}

fn model_name(kind: &Kind, [heads, kv_heads, head_dim]: HeadSizes) -> String {
    match [heads, kv_heads, head_dim] {
        WIDE => format!("model {}, heads of {head_dim}", kind[0]),
        _ => format!("model {}", kind[0]),
    }
}

/// Compares a result with the exact one by the norm of each row and of all rows; a bf16 loss has a tolerance of its
/// own.
fn judge(kind: &Kind, is_bf16: bool, [own, plain]: [&[f32]; 2], (name, width, exact): &Found) -> Outcome {
    if is_bf16 && name == "loss" {
        return Tolerance::new(2.0, LOSS_TOLERANCE, 0.0).judge(name, own, plain, exact);
    }
    let [of_all, of_a_row] = match kind[2] {
        "chosen" if is_bf16 => OF_A_CHOICE,
        "all biased" if is_bf16 && name.ends_with(".a") => [0.0, CANCELLING_SHARE],
        _ if is_bf16 && name.starts_with("gradient of") => [0.0, OF_A_ROW],
        _ => [0.0; 2],
    };
    let rows = RowTolerance { most_of_plain: f64::INFINITY, of_a_row, ..RowTolerance::new(is_bf16, of_all) };
    rows.judge(name, own, plain, exact, &row_norms(exact, *width))
}

/// The recipe of a model; its tokenizer and data are never read.
fn recipe(kind: &Kind, [heads, kv_heads, head_dim]: HeadSizes) -> Result<Recipe> {
    let (model, attention) = kind[3].split_once("[attention]\n").unwrap_or(("", kind[3]));
    let text = format!(
        "[model]\n{model}hidden_size = 128\nintermediate_size = 192\nnum_hidden_layers = {LAYERS}\n\
         num_attention_heads = {heads}\nnum_key_value_heads = {kv_heads}\nhead_dim = {head_dim}\n\
         max_position_embeddings = {SEQ_LEN}\ninitializer_range = 0.09\nrms_norm_eps = {NORM_EPSILON}\n\
         attention_sinks = {}\n[attention]\n{attention}\n[tokenizer]\n\
         path = \"none\"\n[data]\npaths = [\"none\"]\n[training]\nsteps = 1\nseq_len = {SEQ_LEN}\n\
         local_batch_size = {ROWS}\n[optimizer]\nlr = {LEARNING_RATE}\n",
        has_sinks(kind),
    );
    Recipe::load(&text, kind[0], &[]).map_err(|error| BenchError::Refused(error.to_string()))
}

/// Initial weights of a model, exact in bf16. Norm weights begin as ones: noise makes them different, so that swapped
/// norms show.
pub(crate) fn drawn_weights(shape: &ModelShape, seed: u64, random: &mut Random) -> Vec<NamedTensor> {
    let mut weights = named_parameters(&Qwen3::<Flex>::new(shape, seed, &FlexDevice));
    for NamedTensor { data, .. } in &mut weights {
        let spread = if data.shape.len() == 1 { 0.2 } else { 0.0 };
        let values = data.iter::<f32>().map(|x| round_bf16(x + spread * random.normal_with_tails()));
        *data = TensorData::new(values.collect::<Vec<_>>(), data.shape.clone());
    }
    weights
}

/// A model with these weights in `dtype`.
pub(crate) fn model_of<B: TrainBackend>(
    shape: &ModelShape,
    weights: &[NamedTensor],
    dtype: DType,
    device: &B::Device,
) -> Qwen3<B> {
    let read = &mut |name: &str, _shape: &[usize]| -> Result<TensorData, Infallible> {
        let found = weights.iter().find(|tensor| tensor.name == name);
        Ok(found.expect("a model of the same shape").data.clone())
    };
    let seed = 0; // of weights that are overwritten
    let Ok(model) = load_parameters(Qwen3::new(shape, seed, device), dtype, read);
    model
}

impl Setup {
    /// Draws weights, tokens, and labels, which are ignored at the last token of each document.
    fn draw(kind: &Kind, sizes: HeadSizes, seed: u64) -> Result<Self> {
        let recipe = recipe(kind, sizes)?;
        let shape = recipe.model_shape(VOCAB_SIZE);
        let shape = shape.map_err(|error| BenchError::Refused(error.to_string()))?;
        let mut random = Random(seed);
        let weights = drawn_weights(&shape, seed, &mut random);
        let mut ids = || -> Vec<i32> { (0..ROWS * SEQ_LEN).map(|_| random.below(VOCAB_SIZE) as i32).collect() };
        let (tokens, mut labels) = (ids(), ids());
        let mut bounds = [Vec::new(), Vec::new()];
        // The first row is one document; the second has three, of 33 tokens, 1 token and 62 tokens.
        for documents in [&[0, SEQ_LEN][..], &[0, 33, 34, SEQ_LEN]] {
            for document in documents.windows(2) {
                for (all, bound) in bounds.iter_mut().zip(document) {
                    all.resize(all.len() + document[1] - document[0], *bound as u32);
                }
                labels[bounds[0].len() - 1] = IGNORE_LABEL;
            }
        }
        Ok(Self { recipe, shape, weights, tokens, labels, bounds })
    }

    /// The model with weights of type `dtype`.
    fn model<B: TrainBackend>(&self, dtype: DType, device: &B::Device) -> Qwen3<B> {
        model_of(&self.shape, &self.weights, dtype, device)
    }

    /// Results of the CPU in f64, and of the CPU in bf16 by plain-Burn operations.
    fn references(&self) -> [Vec<Found>; 2] {
        [(DType::F64, DType::F64), (DType::F32, DType::BF16)].map(|(held, dtype)| {
            let (device, policy) = (&FlexDevice, KernelPolicy::default());
            let model = self.model::<Autodiff<Flex>>(held, device);
            self.run(&model, &On { device, dtype, policy }).0
        })
    }

    /// Loss, gradients, updates by AdamW and Muon, and logits without and with a cache; and the model that computed
    /// them.
    fn run<B: TrainBackend>(&self, model: &Qwen3<B>, on: &On<'_, B>) -> (Vec<Found>, Qwen3<B>) {
        let (mut found, computed) = self.step(model, on, OptimizerName::AdamW);
        let (of_muon, _) = self.step(model, on, OptimizerName::Muon);
        found.extend(of_muon.into_iter().filter(|(name, ..)| name.starts_with("Muon")));
        found.extend(self.logits(&computed.valid(), on.dtype, on.device));
        (found, computed)
    }

    /// Loss, gradients and updates of a training step, and the model before the update. In bf16 the optimizer holds f32
    /// master weights.
    fn step<B: TrainBackend>(&self, model: &Qwen3<B>, on: &On<'_, B>, name: OptimizerName) -> (Vec<Found>, Qwen3<B>) {
        let &On { device, dtype, .. } = on;
        let mut section = self.recipe.optimizer.clone();
        (section.name, section.eps) = (name, EPSILON);
        let mut optimizer = Optimizer::new(section, &self.shape);
        let model = match dtype {
            DType::BF16 => optimizer.hold_masters(model.clone()),
            _ => model.clone(),
        };
        let (mut found, mut gradients) = self.gradients(&model, on, |_| {});
        let before = named_parameters(&model);
        let scale = Tensor::from_data(TensorData::from([0.5f32]), (device, table_type(dtype)));
        let updated = optimizer.step(model.clone(), &mut gradients, scale, LEARNING_RATE);
        for (before, after) in before.into_iter().zip(named_parameters(&updated)) {
            let update = floats(after.data).into_iter().zip(floats(before.data));
            let update: Vec<f32> = update.map(|(after, before)| after - before).collect();
            found.push((format!("{name:?}'s update of {}", before.name), update.len(), update));
        }
        (found, model)
    }

    /// Loss and gradients of a training step whose block settings `form` changes.
    fn gradients<B: TrainBackend>(
        &self,
        model: &Qwen3<B>,
        on: &On<'_, B>,
        form: impl FnOnce(&mut BlockSettings),
    ) -> (Vec<Found>, GradientBuffer<B>) {
        let &On { device, dtype, policy } = on;
        let num_labels = self.labels.iter().filter(|&&label| label >= 0).count();
        let batch = DeviceBatch {
            tokens: rows_of(&self.tokens, device),
            labels: rows_of(&self.labels, device),
            documents: Documents::new(&self.bounds[0], &self.bounds[1], [ROWS, SEQ_LEN], device),
            parts: None, // whole rows: no context parallelism
        };
        let share = 1.0 / num_labels as f64;
        let mut settings = BlockSettings::default();
        settings.layers.policy = policy;
        settings.layers.token_share = share;
        form(&mut settings);
        let (rope, mut gradients) = (rope(model, SEQ_LEN, dtype, device), GradientBuffer::default());
        let result = accumulate_gradients_with(&settings, model, &batch, &rope, share, &mut gradients);
        let mut found = vec![("loss".to_owned(), 1, floats(result.loss.into_data()))];
        for NamedTensor { name, data } in gradients.named(model) {
            let width = data.shape.to_vec().last().copied().unwrap_or(1);
            found.push((format!("gradient of {name}"), width, floats(data)));
        }
        (found, gradients)
    }

    /// Logits of the first row, which is one document: by one pass, and through the cache. The f64 reference has no
    /// cache, so it returns the pass's logits for both.
    fn logits<B: DeviceBackend>(&self, model: &Qwen3<B>, dtype: DType, device: &B::Device) -> Vec<Found> {
        let rope = rope(model, SEQ_LEN, dtype, device);
        let ids = rows_of(&self.tokens, device).narrow(0, 0, 1);
        let documents = Documents::whole_rows([1, SEQ_LEN], device);
        let logits = model.logits(ids, &LayerContext::new(&documents, &rope));
        let logits = floats(logits.into_data());
        let cached = match dtype {
            DType::F64 => logits[(PREFILLED - 1) * VOCAB_SIZE..].to_vec(),
            _ => self.through_the_cache(model, dtype, device, SEQ_LEN).expect("this thread alone"),
        };
        vec![("logits".to_owned(), VOCAB_SIZE, logits), ("logits through the cache".to_owned(), VOCAB_SIZE, cached)]
    }

    /// Logits of the first row through the cache. They are kept until the last is there; logits of tokens from
    /// `moved_at` on are computed on another thread, which reads each at once.
    fn through_the_cache<B: DeviceBackend>(
        &self,
        model: &Qwen3<B>,
        dtype: DType,
        device: &B::Device,
        moved_at: usize,
    ) -> Result<Vec<f32>, Wrong> {
        let tables = [LONGER_FROM, SEQ_LEN].map(|len| rope(model, len, dtype, device));
        let ids = rows_of(&self.tokens, device).narrow(0, 0, 1);
        let mut cache = KvCache::new(model.layers.len());
        let mut next = |&(first, count): &(usize, usize)| {
            let tables = &tables[usize::from(first >= LONGER_FROM)];
            model.next_logits(ids.clone().narrow(1, first, count), &mut cache, tables)
        };
        let singles = (PREFILLED..SEQ_LEN).map(|at| (at, 1));
        let parts: Vec<_> = std::iter::once((0, PREFILLED)).chain(singles).collect();
        let (here, there) = parts.split_at((moved_at + 1).saturating_sub(PREFILLED));
        let kept: Vec<_> = here.iter().map(&mut next).collect();
        let mut found: Vec<f32> = kept.into_iter().flat_map(|logits| floats(logits.into_data())).collect();
        let read = move || there.iter().flat_map(|part| floats(next(part).into_data())).collect::<Vec<_>>();
        let rest = std::thread::scope(|scope| scope.spawn(read).join());
        found.extend(rest.map_err(|_| Wrong::from("the other thread panicked".to_owned()))?);
        Ok(found)
    }

    /// Logits of the first row, of a dense model, through the caches of a selector. With `in_one_call` the second and
    /// later tokens after the prompt are captured steps; otherwise all are launched layer by layer.
    fn under_selector<B: DeviceBackend>(
        &self,
        model: &Qwen3<B>,
        dtype: DType,
        device: &B::Device,
        (keys, in_one_call): (TokenKeys, bool),
    ) -> Result<Vec<f32>, Wrong> {
        let rope = rope(model, SEQ_LEN, dtype, device);
        let ids = |first, count| rows_of(&self.tokens, device).narrow(0, 0, 1).narrow(1, first, count);
        let mut cache = KvCache::new(model.layers.len());
        let mut logits = vec![model.next_logits(ids(0, PREFILLED), &mut cache, &rope)];
        for layer in &mut cache.layers {
            let LayerCache::Recent(RecentCache { keys: dense, .. }) = &*layer else {
                return wrong("not a dense layer's cache");
            };
            let kv = [&dense.k, &dense.v].map(|x| x.tokens().swap_dims(1, 2));
            let is_fixed = true;
            *layer = LayerCache::Selector(SelectorCache::new(kv, keys, is_fixed));
        }
        let attend = &mut |op: &LayerOperands<B>, cache: &mut LayerCache<B>, scratch: &mut B::DecodeScratch| match cache
        {
            LayerCache::Selector(cache) => {
                selector_decode(cache, op.qkv.clone(), &[keys], op.spec().softmax_scale, scratch)
            }
            _ => Err("not a selector's cache".to_owned()),
        };
        for at in PREFILLED..SEQ_LEN {
            let step = in_one_call.then(|| model.token_step(&ids(at, 1), &mut cache, &rope));
            let step = step.flatten();
            if in_one_call && at > PREFILLED && step.is_none() {
                return wrong(format!("token {at} is not one call"));
            }
            logits.push(match step {
                Some(logits) => logits,
                None => model.next_logits_attending(ids(at, 1), &mut cache, &rope, attend).map_err(Wrong::from)?,
            });
        }
        Ok(logits.into_iter().flat_map(|logits| floats(logits.into_data())).collect())
    }

    /// Logits of the first row's tokens after each of [`PROMPTS`], decoded as texts in the three rows of one cache, two
    /// at a time; and whether a step is one call or a call for each layer.
    fn in_rows<B: DeviceBackend>(
        &self,
        model: &Qwen3<B>,
        dtype: DType,
        device: &B::Device,
    ) -> ([Vec<f32>; 3], &'static str) {
        let rope = rope(model, SEQ_LEN, dtype, device);
        let ids = rows_of(&self.tokens, device).narrow(0, 0, 1);
        let next = |first, count, cache: &mut KvCache<B>| {
            let logits = model.next_logits(ids.clone().narrow(1, first, count), cache, &rope);
            floats(logits.into_data())
        };
        let (mut rows, mut found) =
            (TextRows::beginning_with(FIRST_ROWS, [PROMPTS.len(), SEQ_LEN], device), PROMPTS.map(|_| Vec::new()));
        let (mut texts, mut waiting, mut calls) = (Vec::new(), PROMPTS.iter().enumerate(), "one call a step");
        let mut paused: Option<InRow> = None;
        loop {
            for (text, &at) in waiting.by_ref().take(2 - texts.len()) {
                let mut cache = KvCache::new(model.layers.len());
                next(0, at, &mut cache);
                let row = rows.put(&mut cache);
                texts.push(InRow { text, row, at });
            }
            if texts.is_empty() {
                let Some(InRow { row, .. }) = &mut paused else {
                    return (found, calls);
                };
                let mut text = rows.take(*row);
                *row = rows.put(&mut text);
                texts.extend(paused.take());
            }
            let mut tokens = vec![0; rows.num_rows()];
            for InRow { row, at, .. } in &texts {
                tokens[*row] = self.tokens[*at];
            }
            let tokens = Tensor::<B, 1, Int>::from_data(tokens.as_slice(), device).unsqueeze_dim(1);
            let logits = model.next_logits_of_texts(&tokens, &mut rows, &rope);
            let logits = logits.map(|logits| floats(logits.into_data()));
            for InRow { text, row, at } in &mut texts {
                match &logits {
                    Some(logits) => found[*text].extend(&logits[*row * VOCAB_SIZE..][..VOCAB_SIZE]),
                    None => {
                        calls = "a call for each layer";
                        let mut own = rows.take(*row);
                        found[*text].extend(next(*at, 1, &mut own));
                        *row = rows.put(&mut own);
                    }
                }
                *at += 1;
                if *at == SEQ_LEN {
                    rows.free(*row);
                }
            }
            texts.retain(|text| text.at < SEQ_LEN);
            // The first text is kept while the others are decoded: the third one then needs a third row.
            if let Some(at) = texts.iter().position(|text| text.text == 0 && text.at == PAUSED_AT) {
                rows.keep(texts[at].row);
                paused = Some(texts.remove(at));
            }
        }
    }
}

/// A text that is decoded in a row of [`TextRows`].
struct InRow {
    /// Index of the text in [`PROMPTS`].
    text: usize,
    row: usize,
    /// Index of the token that is decoded next.
    at: usize,
}

fn rows_of<B: Backend>(values: &[i32], device: &B::Device) -> Tensor<B, 2, Int> {
    Tensor::from_data(TensorData::new(values.to_vec(), [ROWS, SEQ_LEN]), device)
}

/// The rotary tables of `len` positions; for f64 the same f32 numbers, cast.
fn rope<B: Backend>(model: &Qwen3<B>, len: usize, dtype: DType, device: &B::Device) -> RotaryEmbedding<B> {
    model.rope(len, device).map(&|table| table.cast(table_type(dtype)))
}

fn floats(data: TensorData) -> Vec<f32> {
    data.iter::<f32>().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_core::model::Attention;

    type B = Autodiff<Flex>;

    fn run(setup: &Setup, model: &Qwen3<B>) -> Vec<Found> {
        let (device, dtype, policy) = (&FlexDevice, DType::F32, KernelPolicy::default());
        setup.run(model, &On { device, dtype, policy }).0
    }

    #[test]
    fn every_kind_passes_on_the_cpu() {
        let mut report = Report::default();
        let (extent, on) = (Extent::all(1, 1, 7), (&FlexDevice, DType::F32));
        check::<B>(&mut report, on, (CheckPart::All, true), &extent).expect("recipes");
        // Twelve kinds, one of layers without RoPE and two with sinks; eight of these with wide heads too.
        assert_eq!((report.failed(), report.rows().len()), (0, 24), "{report}");
    }

    /// Results such as a faulty device gives must fail even the wide tolerance of bf16.
    #[test]
    fn a_wrong_model_does_not_pass() {
        let (kind, _) = &of_part(CheckPart::Attention).find(|(kind, _)| kind[0] == "swa").expect("windows");
        let draw = || Setup::draw(kind, USUAL, 3).expect("a recipe");
        let setup = draw();
        let [exact, plain] = setup.references();
        let failed = |found: &[Found]| -> Vec<String> {
            let all = found.iter().zip(&plain).zip(&exact);
            let failed = all.filter(|((own, plain), exact)| judge(kind, true, [&own.2, &plain.2], exact).is_err());
            failed.map(|((own, _), _)| own.0.clone()).collect()
        };
        let right = setup.model(DType::F32, &FlexDevice);
        let found = run(&setup, &right);
        assert_eq!(failed(&found), [""; 0]);
        assert_eq!(failed(&plain), [""; 0], "plain bf16 passes its own tolerance");
        let at = |name: &str| found.iter().position(|found| found.0.contains(name)).expect("a result");
        let norms = ["layers.0.self_attn.qkv.q_norm", "layers.0.self_attn.qkv.k_norm"].map(at);
        let mut swapped = found.clone();
        swapped.swap(norms[0], norms[1]);
        assert_eq!(failed(&swapped).len(), 2, "gradients in each other's place");
        for at in 0..found.len() {
            let mut scaled = found.clone();
            scaled[at].2.iter_mut().for_each(|x| *x *= 1.25);
            assert_eq!(failed(&scaled), [found[at].0.clone()], "a wrong scale");
        }
        let (mut one_row, weight) = (found.clone(), at("gradient of layers.0.mlp.gate_up"));
        let width = one_row[weight].1;
        one_row[weight].2[..width].iter_mut().for_each(|x| *x *= 1.15);
        assert_eq!(failed(&one_row), [found[weight].0.clone()], "one row of a gradient");

        let other = |change: fn(&mut ModelShape)| {
            let mut setup = draw();
            change(&mut setup.shape);
            setup.model(DType::F32, &FlexDevice)
        };
        let no_epsilon = other(|shape| shape.rms_norm_eps = 1e-6);
        let whole_rows = Setup { bounds: [vec![0; ROWS * SEQ_LEN], vec![SEQ_LEN as u32; ROWS * SEQ_LEN]], ..draw() };
        let mut one_wider = right.clone();
        one_wider.layers[1] = other(|shape| shape.attention = Attention::swa(17)).layers[1].clone();
        let mut sharper = right.clone();
        let Attention::Swa { .. } = setup.shape.attention else { panic!("windows") };
        if let sieve_nn::Attention::Grouped(layer) = &mut sharper.layers[0].self_attn {
            let norm = layer.qkv.q_norm.as_mut().expect("norms of queries");
            norm.weight = norm.weight.clone().map(|weight| weight * 1.25);
        }
        for (what, setup, model, caught) in [
            ("a window that is one key wider", &setup, &one_wider, ["gradient of layers.1", "logits through"]),
            ("rows that are one document", &whole_rows, &right, ["gradient of embed_tokens", "gradient of layers.0"]),
            ("a softmax scale that is wrong", &setup, &sharper, ["gradient of layers.0", "logits through"]),
            ("norms without their epsilon", &setup, &no_epsilon, ["gradient of layers.0", "logits through"]),
        ] {
            let failed = failed(&run(setup, model));
            for name in caught {
                assert!(failed.iter().any(|failed| failed.contains(name)), "{what}: {failed:?}");
            }
        }
    }
}
