//! The line that says what is trained: sizes, attention with its form, density, number format, initial weights.

use std::fmt;

use crate::recipe::{SHARED_LAYER, Stage};
use crate::{Attention, ModelShape, Recipe};

/// What stands before the [`model_line`] on the first line of a run's `config.toml`.
pub const MODEL_LINE: &str = "# model: ";

/// The weights that a model begins with, or was loaded from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InitialWeights {
    /// Drawn at random from `training.seed`.
    Seed(u64),
    /// The weights of a checkpoint, or of another model's folder.
    Folder {
        /// Path of the folder.
        path: String,
        /// Number of optimizer steps that they were trained for; `None` for a model that another program wrote.
        step: Option<u64>,
    },
    /// The weights of a run whose folder does not record where it began.
    NotRecorded,
}

impl fmt::Display for InitialWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Seed(seed) => write!(f, "random, seed {seed}"),
            Self::Folder { path, step: Some(step) } => write!(f, "{path}, at step {step}"),
            Self::Folder { path, step: None } => write!(f, "{path}"),
            Self::NotRecorded => write!(f, "not recorded"),
        }
    }
}

/// The number formats that a model computes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumberFormat {
    /// Everything in f32.
    F32,
    /// f32, with the weights of GEMMs in bf16.
    Bf16Weights,
    /// Weights and activations in bf16, without masters.
    Bf16,
    /// Training in f32, as on a CPU; fp8 GEMMs where the recipe asks for them.
    TrainedInF32,
    /// Training with bf16 weights and activations over f32 masters, as on a GPU; fp8 GEMMs where the recipe asks for
    /// them.
    TrainedInBf16,
    /// Not recorded.
    NotRecorded,
}

impl NumberFormat {
    /// The format, and in how many blocks the recipe trains with fp8 GEMMs.
    fn words(self, recipe: &Recipe) -> String {
        let words = match self {
            Self::F32 | Self::TrainedInF32 => "f32",
            Self::Bf16Weights => "f32 with bf16 weights",
            Self::Bf16 => "bf16",
            Self::TrainedInBf16 => "bf16 over f32 masters",
            Self::NotRecorded => "number format not recorded",
        };
        let num_layers = recipe.model.num_hidden_layers;
        match (self, recipe.training.fp8_blocks(num_layers).len()) {
            (Self::TrainedInF32 | Self::TrainedInBf16, in_fp8 @ 1..) => {
                format!("{words} with fp8 GEMMs in {in_fp8} of {num_layers} blocks")
            }
            _ => words.to_owned(),
        }
    }
}

/// What decides a model's results, on one line: parameters, layers, [attention](attention_words), number format, and
/// the weights that it began with or has ([`InitialWeights`]). `shape` is the recipe's model.
pub fn model_line(recipe: &Recipe, shape: &ModelShape, numbers: NumberFormat, weights: &dyn fmt::Display) -> String {
    let parameters = shape.parameters();
    let line = format!(
        "{} parameters ({} without embedding), {} layers x {}, attention {}, {}, weights {weights}",
        thousands(parameters.total()),
        thousands(parameters.non_embedding()),
        shape.num_layers,
        shape.d_model,
        attention_words(recipe, shape),
        numbers.words(recipe),
    );
    // A folder's name may hold a line break.
    line.replace(char::is_control, " ")
}

/// A [`model_line`] of at most `width` characters, if that is possible without what every line says: sizes, kind,
/// density, number format and where the weights come from. Left out are words in brackets, then the form of the
/// attention from its last clause on, then the beginning of a folder's path; `…` ends such a line.
pub fn fitted_model_line(line: &str, width: usize) -> String {
    let mut clauses = clauses(line);
    let fits = |clauses: &[String]| clauses.join(", ").chars().count() + " …".chars().count() <= width;
    if line.chars().count() <= width {
        return line.to_owned();
    }
    for place in 0..clauses.len() {
        if !fits(&clauses)
            && let Some((before, after)) = clauses[place].split_once(" (")
        {
            let after = after.rsplit_once(')').map_or("", |(_, after)| after);
            clauses[place] = format!("{before}{after}");
        }
    }
    let place_of = |clauses: &[String], word: &str| clauses.iter().position(|clause| clause.starts_with(word));
    while let (false, Some(kind), Some(density)) =
        (fits(&clauses), place_of(&clauses, "attention "), place_of(&clauses, "density "))
    {
        if density == kind + 1 {
            break;
        }
        // How many layers are of another kind says more than the form.
        let of_form = (kind + 1..density).rev().find(|&place| !clauses[place].contains(" layers "));
        clauses.remove(of_form.unwrap_or(density - 1));
    }
    if let (false, Some(weights)) = (fits(&clauses), place_of(&clauses, "weights ")) {
        let surplus = clauses.join(", ").chars().count() + " ……".chars().count() - width;
        let path = clauses[weights].trim_start_matches("weights ").to_owned();
        // At least the folder's own name stays.
        let name = path.rsplit('/').next().map_or(0, |name| name.chars().count());
        let cut = surplus.min(path.chars().count() - name);
        clauses[weights] = format!("weights …{}", path.chars().skip(cut).collect::<String>());
    }
    clauses.join(", ") + " …"
}

/// The parts of a line between the commas that stand in no brackets.
fn clauses(line: &str) -> Vec<String> {
    let (mut all, mut depth) = (vec![String::new()], 0_i32);
    for (at, letter) in line.char_indices() {
        depth += i32::from(letter == '(') - i32::from(letter == ')');
        match (letter, depth) {
            (',', 0) if line[at..].starts_with(", ") => all.push(String::new()),
            (' ', 0) if line[..at].ends_with(',') => {}
            _ => all.last_mut().expect("one at least").push(letter),
        }
    }
    all
}

/// Attention's kind with its form and sizes, the layers of other kinds, and the density of full rows in each stage. The
/// density is the share of dense causal attention's (query, key) pairs that the kind's layers read in a row of one
/// document ([`Attention::densities`](crate::Attention::densities)).
pub fn attention_words(recipe: &Recipe, shape: &ModelShape) -> String {
    let attention = recipe.attention.own;
    let label = attention.as_kind().label().into_iter();
    let words =
        std::iter::once(attention.kind().name().to_owned()).chain(label).chain(attention.as_kind().form_words(shape));
    let mut words = words.chain(layer_words(shape)).collect::<Vec<_>>().join(", ");
    let mut stages: Vec<String> = Vec::new();
    for stage in recipe.stages() {
        let clause = density_words(recipe, &stage, shape);
        if stages.last() != Some(&clause) {
            stages.push(clause);
        }
    }
    words += &format!(", {}", stages.join(", then "));
    if recipe.training.dense_steps > 0.0 {
        words += &format!(", every key in {} of the steps", recipe.training.dense_steps);
    }
    words
}

/// The model's name for pictures and tables: its kind, its sizes, and how many layers differ.
pub fn attention_label(shape: &ModelShape) -> String {
    let kind = shape.attention.kind().name().to_owned();
    let label = std::iter::once(kind).chain(shape.attention.as_kind().label()).chain(layer_counts(shape));
    label.collect::<Vec<_>>().join(", ")
}

/// How many layers are of another kind, share an earlier layer's choice, or do not rotate queries and keys.
fn layer_counts(shape: &ModelShape) -> impl Iterator<Item = String> {
    let layers = shape.num_layers;
    let without_rope = (shape.num_nope_layers(), "without RoPE".to_owned());
    let others = shape.attentions().into_iter().skip(1).map(|(other, count)| (count, other_words(other)));
    let shared = (shape.num_shared_layers(), "with an earlier layer's choice".to_owned());
    let counts = others.chain([shared, without_rope]).filter(|(count, _)| *count > 0);
    counts.map(move |(count, words)| format!("{count} of {layers} layers {words}"))
}

/// A kind beside the model's own: its name and its sizes.
fn other_words(other: Attention) -> String {
    match other.as_kind().label() {
        // Only dense attention has no sizes.
        None => "dense".to_owned(),
        Some(label) => format!("{} ({label})", other.kind().name()),
    }
}

/// The longest pattern of layers that is written out.
const MOST_NAMES: usize = 8;

/// The clauses of [`layer_counts`], then the repeated pattern of `model.layer_types`; `None` if there is no clause.
fn layer_words(shape: &ModelShape) -> Option<String> {
    let counts = layer_counts(shape).collect::<Vec<_>>().join(", ");
    let period = shape.layers.types().len();
    let names = (0..period)
        .map(|layer| if shape.is_shared_layer(layer) { SHARED_LAYER } else { shape.attention_of(layer).kind().name() });
    let names = names.collect::<Vec<_>>().join(", ");
    // A published model may list all of its layers.
    let names = if (1..=MOST_NAMES).contains(&period) { format!(" (layers {names})") } else { String::new() };
    (!counts.is_empty()).then(|| format!("{counts}{names}"))
}

/// The density of a stage's full rows, after the stage's window if it has one of its own.
fn density_words(recipe: &Recipe, stage: &Stage, shape: &ModelShape) -> String {
    let (recipe_of_stage, seq_len) = (recipe.at_stage(stage), stage.section.seq_len);
    let attention = recipe_of_stage.attention.own;
    let shape = &recipe.shape_at(stage, shape);
    if attention.kind() != recipe.attention.kind() || recipe_of_stage.model.layer_types != recipe.model.layer_types {
        let words = std::iter::once(attention.kind().name().to_owned()).chain(layer_words(shape));
        return words.collect::<Vec<_>>().join(", ") + ", " + &density_of(attention, shape, seq_len);
    }
    let window = (attention.window() != recipe.attention.window()).then(|| attention.as_kind().label()).flatten();
    let window = window.map_or(String::new(), |label| format!("{label}: "));
    window + &density_of(attention, shape, seq_len)
}

/// The density of full rows of a model of `shape`, whose own kind is `attention`. A kind with one density has the mean
/// over all layers in brackets where layers differ.
fn density_of(attention: Attention, shape: &ModelShape, seq_len: usize) -> String {
    let branches = attention.densities(seq_len);
    let words_of = |density: f64, branch: Option<&str>| {
        let branch = branch.map_or(String::new(), |name| format!(" {name}"));
        format!("{}{branch}", share(density))
    };
    let densities = branches.iter().map(|branch| words_of(branch.density, branch.branch));
    let densities = densities.collect::<Vec<_>>().join(" + ");
    let mut words = format!("density {densities} on rows of {seq_len}");
    let others = &shape.attentions()[1..];
    if let [only] = branches.as_slice()
        && !others.is_empty()
    {
        let others_are_dense = others.iter().all(|(other, _)| *other == Attention::DENSE);
        let which = if others_are_dense { "with the dense layers" } else { "over all layers" };
        let density = |layer: Attention| {
            if layer == shape.attention {
                only.density
            } else {
                layer.densities(seq_len).iter().map(|branch| branch.density).sum()
            }
        };
        words += &format!(" ({} {which})", share(shape.mean_over_layers(density)));
    }
    if attention.index_warmup() == Some(true) {
        words += " while the indexer learns from every key";
    }
    if attention.covers_rows(seq_len) {
        words += &format!(" ({})", covered_words(seq_len));
    }
    words
}

/// Words for attention of a kind that hides keys, in rows of which it hides none
/// ([`Attention::covers_rows`](crate::Attention::covers_rows)).
pub fn covered_words(seq_len: usize) -> String {
    format!("attends to every key of rows of {seq_len} tokens: dense attention")
}

/// A share with three decimals, or two digits if it is small. Less than all is never printed as 1.
fn share(share: f64) -> String {
    match share {
        x if x >= 1.0 && (x - 1.0).abs() < 5e-4 => "1".to_owned(),
        x if x < 1.0 && x > 0.9994 => "0.999".to_owned(),
        x if x >= 0.01 || x == 0.0 => format!("{x:.3}"),
        x => format!("{x:.1e}"),
    }
}

/// A whole number with commas between groups of three digits.
pub fn thousands(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_line_keeps_what_every_line_says() {
        let line = "model: 134,515,008 parameters (106,203,456 without embedding), 30 layers x 576, attention dma, \
            keeps 1024, the last 16 always, slope 64 to 4096, bias linear, 7 of 28 layers dense (layers dma, dma, dma, \
            mha), density 0.438 on rows of 4096 (0.57 with the dense layers), bf16 over f32 masters, weights \
            /home/u/in/smollm2";
        assert_eq!(
            fitted_model_line(line, 200),
            "model: 134,515,008 parameters, 30 layers x 576, attention dma, keeps 1024, the last 16 always, 7 of 28 \
             layers dense, density 0.438 on rows of 4096, bf16 over f32 masters, weights /home/u/in/smollm2 …"
        );
        assert_eq!(fitted_model_line(line, 400), line);
        let deep = line.replace("/home/u/in/smollm2", &format!("{}/run, at step 4", "/folder".repeat(30)));
        for (line, width) in [(line, 200), (line, 170), (deep.as_str(), 200), (deep.as_str(), 170)] {
            let fitted = fitted_model_line(line, width);
            assert!(fitted.chars().count() <= width, "{width}: {fitted}");
            for words in ["134,515,008 parameters, 30 layers x 576, attention dma", "density 0.438", "bf16", "weights "]
            {
                assert!(fitted.contains(words), "{words}: {fitted}");
            }
        }
        assert!(fitted_model_line(&deep, 200).ends_with("/run, at step 4 …"));
        // What cannot be left out stays, though it is too long.
        assert!(fitted_model_line(line, 20).contains("weights …smollm2"));
    }
}
