//! Checks that a training step with `training.same_bits` gives a token the log-probability, to the bit, that a pass
//! over its whole text gives it where nothing is trained: that of `echo`, `eval ppl` and, with `--same-bits`, of a
//! decoding step.
use crate::error::{BenchError, Result};
use crate::extent::{CheckPart, Extent};
use crate::models::{On, drawn_weights, model_of};
use crate::report::{Outcome, Report, wrong};
use burn::module::AutodiffModule;
use burn::tensor::{DType, Tensor, TensorData};
use sieve_core::Recipe;
use sieve_core::model::Chooses;
use sieve_core::recipe::AttentionKind;
use sieve_kernels::KernelPolicy;
use sieve_nn::{LayerContext, Qwen3};
use sieve_ops::{Documents, IGNORE_LABEL, TrainBackend};
use sieve_testing::{Random, cases};
use sieve_train::{BlockSettings, DeviceBatch, GradientBuffer, accumulate_gradients_with};

/// Tokens of the text, and of the rows that a batch pads it to: epochs, tiles of queries and blocks that end inside the
/// text and behind it.
const TOKENS: usize = 700;
const SEQ_LEN: usize = 768;

/// Rows of the batch; the text is the last one.
const ROWS: usize = 2;

/// Numbers of the vocabulary: a multiple of eight, as a GEMM in one order needs.
const VOCAB_SIZE: usize = 328;

/// Kinds, and keys of `[attention]` by which their queries read fewer keys than the text has; a row a model. Kinds
/// without a row read all.
const FORMS: &str = r"
    swa => sliding_window = 100
    cowa => sink_tokens = 16\nnear_window = 64\nfar_reach = 600\nnum_bands = 2
    nsa => window_size = 100
    nsa => window_size = 100\ncompress = 'mlp'\nshared_kv = false
    dma => preset = 'paper'\nkeep_window_size = 96
    dma => keep_window_size = 96\nlocal_window_size = 12\nbias = 'linear'\nrecency = 'slope'
";

/// These keys of kinds that choose blocks.
const BLOCKS: &str = "select_block_size = 64\nnum_selected_blocks = 3";

/// Checks the models of a part, of each kind whose steps have the bits of whole rows, on a backend that computes in
/// `dtype`.
///
/// # Errors
/// A recipe that does not parse.
pub(crate) fn check<B: TrainBackend>(
    report: &mut Report,
    (device, dtype): (&B::Device, DType),
    part: CheckPart,
    extent: &Extent,
) -> Result<()> {
    let on = On::<B> { device, dtype, policy: extent.policy };
    let is_gpu = dtype == DType::BF16;
    let path = if is_gpu { "kernel" } else { "cpu" };
    let kinds = AttentionKind::ALL.into_iter().filter(|kind| kind.facts().has_one_order && is_of(*kind, part));
    for (kind, keys) in kinds.flat_map(|kind| forms(kind).into_iter().map(move |keys| (kind, keys))) {
        let (name, seed) = (format!("model {}", kind.name()), extent.seed);
        let mut text = Text::draw(kind, keys, seed)?;
        if !is_gpu {
            // A pass takes half a second there, and sums have one order anyway.
            text.compared.truncate(5);
        }
        let form = if keys.is_empty() { String::new() } else { format!(", {}", keys.replace('\n', ", ")) };
        let case = format!("a trained token's log-probability{form}, seed {seed}");
        report.add(&name, path, &case, text.check(&on, kind));
    }
    Ok(())
}

/// Whether models of a kind belong to a part of the check.
fn is_of(kind: AttentionKind, part: CheckPart) -> bool {
    let (chooses, has_bands) = (kind.facts().chooses, forms(kind).iter().any(|keys| keys.contains("num_bands")));
    match part {
        CheckPart::All => true,
        CheckPart::Attention => chooses == Chooses::Nothing && !has_bands,
        CheckPart::Bands => has_bands,
        CheckPart::KeyOrder => chooses == Chooses::Keys,
        CheckPart::Nsa | CheckPart::BlockOrder => chooses == Chooses::Blocks,
        CheckPart::Sparse | CheckPart::Mla | CheckPart::Sinks => false,
    }
}

/// Further keys of `[attention]` for each model of a kind.
fn forms(kind: AttentionKind) -> Vec<&'static str> {
    if kind.facts().chooses == Chooses::Blocks {
        return vec![BLOCKS];
    }
    let of_kind = cases(FORMS).into_iter().filter(|[name, _]| *name == kind.name());
    let keys: Vec<_> = of_kind.map(|[_, keys]| keys).collect();
    if keys.is_empty() { vec![""] } else { keys }
}

/// One model and a text.
struct Text {
    recipe: Recipe,
    seed: u64,
    tokens: Vec<i32>,
    /// Positions whose next token is compared.
    compared: Vec<usize>,
}

impl Text {
    /// Draws a text for a model of a kind with these keys.
    fn draw(kind: AttentionKind, keys: &str, seed: u64) -> Result<Self> {
        let text = format!(
            "[model]\nhidden_size = 256\nintermediate_size = 384\nnum_hidden_layers = 2\nnum_attention_heads = 4\n\
             num_key_value_heads = 2\nhead_dim = 64\nmax_position_embeddings = {SEQ_LEN}\ninitializer_range = 0.09\n\
             [attention]\nkind = '{}'\n{keys}\n[tokenizer]\npath = \"none\"\n[data]\npaths = [\"none\"]\n\
             [training]\nsteps = 1\nseq_len = {SEQ_LEN}\nlocal_batch_size = {ROWS}\nsame_bits = true\n\
             one_document_per_row = true\n\
             [optimizer]\nlr = 1e-3\n",
            kind.name()
        );
        let recipe = Recipe::load(&text, kind.name(), &[]).map_err(|error| BenchError::Refused(error.to_string()))?;
        let mut random = Random(seed ^ 0x0074_7261_696e_6564); // "trained" in ASCII
        let tokens = (0..ROWS * SEQ_LEN).map(|_| random.below(VOCAB_SIZE) as i32).collect();
        let mut compared = vec![0, 63, 126, 127, 128, 255, 256, 511, TOKENS - 2];
        compared.extend((0..15).map(|_| random.below(TOKENS - 1)));
        Ok(Self { recipe, seed, tokens, compared })
    }

    /// Compares the two passes. Where single keys are chosen, their order must make a difference on a GPU: a check that
    /// passes without it would find nothing.
    fn check<B: TrainBackend>(&self, on: &On<'_, B>, kind: AttentionKind) -> Outcome {
        let shape = self.recipe.model_shape(VOCAB_SIZE).map_err(|error| error.to_string())?;
        let weights = drawn_weights(&shape, self.seed, &mut Random(self.seed));
        let model = model_of::<B>(&shape, &weights, on.dtype, on.device);
        let whole = self.whole::<B>(&model.valid().with_same_bits(), on);
        let differing = |same_bits: bool| {
            let trained = self.compared.iter().map(|&position| self.trained(&model, on, position, same_bits));
            let pairs = trained.zip(self.compared.iter().map(|&position| whole[position]));
            pairs.filter(|(trained, whole)| trained.to_bits() != whole.to_bits()).collect::<Vec<_>>()
        };
        let apart = differing(true);
        if let Some((trained, whole)) = apart.first() {
            let counts = format!("{} of {} tokens differ", apart.len(), self.compared.len());
            return wrong(format!("{counts}: {trained:?} in training, {whole:?} in its whole row"));
        }
        let is_ordered = kind.facts().chooses == Chooses::Keys && on.dtype == DType::BF16;
        if is_ordered && differing(false).is_empty() {
            return wrong("no token differs in the order of usual training either");
        }
        Ok(0.0)
    }

    /// The last row's tokens up to the text's end.
    fn text(&self) -> &[i32] {
        &self.tokens[(ROWS - 1) * SEQ_LEN..][..TOKENS]
    }

    /// Losses of the text alone in a row, as `echo` computes them; the last one is of no token.
    fn whole<B: TrainBackend>(&self, model: &Qwen3<B::InnerBackend>, on: &On<'_, B>) -> Vec<f32> {
        let tables = model.rope(TOKENS, on.device);
        let documents = Documents::whole_rows([1, TOKENS], on.device);
        let ints = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, [1, TOKENS]), on.device);
        let labels = self.text()[1..].iter().copied().chain([0]).collect();
        let hidden = model.hidden(ints(self.text().to_vec()), &LayerContext::new(&documents, &tables));
        model.token_losses_of(hidden, ints(labels)).into_data().iter().collect()
    }

    /// The loss of the token behind `position`, the only one that the batch trains on.
    fn trained<B: TrainBackend>(&self, model: &Qwen3<B>, on: &On<'_, B>, position: usize, same_bits: bool) -> f32 {
        let mut labels = vec![IGNORE_LABEL; ROWS * SEQ_LEN];
        labels[(ROWS - 1) * SEQ_LEN + position] = self.text()[position + 1];
        // One document in the first row, the text and padding in the second.
        let bounds = [[0, SEQ_LEN], [0, TOKENS], [TOKENS, SEQ_LEN]];
        let [start, end] = [0, 1].map(|bound| -> Vec<u32> {
            bounds.iter().flat_map(|document| vec![document[bound] as u32; document[1] - document[0]]).collect()
        });
        let ints = |values: Vec<i32>| Tensor::from_data(TensorData::new(values, [ROWS, SEQ_LEN]), on.device);
        let batch = DeviceBatch {
            tokens: ints(self.tokens.clone()),
            labels: ints(labels),
            documents: Documents::new(&start, &end, [ROWS, SEQ_LEN], on.device),
            parts: None, // whole rows: no context parallelism
        };
        let mut recipe = self.recipe.clone();
        recipe.training.same_bits = same_bits;
        let mut settings = BlockSettings::from(&recipe);
        let KernelPolicy { sums, keys, .. } = settings.layers.policy;
        settings.layers.policy = KernelPolicy { sums, keys, ..on.policy };
        let (tables, mut gradients) = (model.rope(SEQ_LEN, on.device), GradientBuffer::default());
        let result = accumulate_gradients_with(&settings, model, &batch, &tables, 1.0, &mut gradients);
        result.loss.into_data().iter().next().expect("one loss")
    }
}
