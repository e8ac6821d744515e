//! `sieve eval attention`: where the attention of a trained model goes, in numbers and as a picture.
use crate::draw::heads::{Heads, Legend, Square};
use anyhow::Result;
use clap::Args;
use serde_json::json;
use sieve_core::ShownPath;
use sieve_eval::{DISTANCES, HeadWeights, LayerWeights, attention_weights};
use sieve_hf::Kept;
use sieve_host::evaluation::{output, so_far, text};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::out_file::PictureFile;
use sieve_host::{hub, loaded, terminal};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use std::fmt::Write;
use std::path::PathBuf;

/// Tokens of the prompt, unless given or the model's context is shorter.
const LENGTH: usize = 512;
/// Pixels of a side of a head's square, at most.
const PIXELS: usize = 512;
/// Attention weights up to this are drawn white.
const FAINTEST: f64 = 1e-4;

/// Name under which `--save` keeps the result.
const COMMAND: &str = "attention";

/// Arguments of `sieve eval attention`.
#[derive(Args, Debug)]
pub struct AttentionArgs {
    /// A checkpoint (step-N), or a run folder: then its latest; any kind of attention; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text, JSONL or Parquet files, folders or globs; the first tokens of the concatenated documents are the prompt
    #[arg(long, required = true, num_args = 1.., value_name = "PATH")]
    data: Vec<String>,
    /// Tokens of the prompt; 512 when absent, or the model's context if that is shorter
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    length: Option<u32>,
    /// Layers, counted from 0, such as 0,3; all when absent
    #[arg(long, value_delimiter = ',', value_name = "N")]
    layers: Vec<usize>,
    /// Also draw the weights of every head: an SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PictureFile>,
    #[command(flatten)]
    result: output::ResultArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Runs `sieve eval attention`: which keys a checkpoint's heads look at on a text.
pub(crate) fn run(mut args: AttentionArgs) -> Result<()> {
    args.checkpoint = hub::folder(&args.checkpoint)?;
    args.result.check(&args.checkpoint, COMMAND, args.plot.is_some())?;
    let place = (args.place).for_checkpoint(&args.checkpoint, |_, shape| {
        let length = length(&args, shape.max_seq_len);
        InferenceSize::rows_of(length, length)
    })?;
    on_device!(place, run_on(&args))
}

fn length(args: &AttentionArgs, context: usize) -> usize {
    args.length.map_or(LENGTH.min(context), |length| length as usize)
}

/// Reads the prompt with the model; prints where attention goes, layer by layer, and draws it.
fn run_on<B: DeviceBackend>(args: &AttentionArgs, device: &B::Device, kept: Kept) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(&args.checkpoint, device, kept)?;
    let length = length(args, loaded.shape.max_seq_len);
    let num_prompts = 1;
    let mut tokens = text::tokens(&args.data, &tokenizer, length, num_prompts)?;
    tokens.truncate(length);
    let layers = so_far::with_bar(loaded.shape.num_layers as u64, "layers", |bar| {
        let mut observe = |done| bar.set_position(done);
        attention_weights(&loaded.model, &tokens, &args.layers, device, &mut observe)
    })?;
    if let Some(path) = &args.plot {
        path.write_text(&picture(&layers, &output::model_name(&loaded), length))?;
    }
    let json = json!({
        "data": args.data, "num_tokens": length, "distances": DISTANCES, "layers": layers,
    });
    if args.result.report(&loaded, COMMAND, json)? {
        return Ok(());
    }
    let heading = output::heading(&loaded);
    terminal::line(&format!("{heading}: attention on {length} tokens"));
    terminal::lines(lines(&layers, length));
    if let Some(path) = &args.plot {
        terminal::line(&format!("wrote {}", path.shown()));
    }
    Ok(())
}

/// The printed table: a row for each layer, then a legend of the columns.
fn lines(layers: &[LayerWeights], length: usize) -> Vec<String> {
    let far: Vec<usize> = (0..DISTANCES.len()).filter(|&idx| DISTANCES[idx] < length).collect();
    let mut head = format!(
        "{:5} {:>8} {:>9} {:>8} {:>8} {:>7} {:>7} {:>8}",
        "layer", "density", "top fifth", "entropy", "distance", "own", "first", "overlap"
    );
    for &idx in &far {
        let _ = write!(head, " {:>7}", format!("> {}", DISTANCES[idx]));
    }
    let mut lines = vec![head];
    for layer in layers {
        let mean = |of: &dyn Fn(&HeadWeights) -> f64| {
            layer.heads.iter().map(of).sum::<f64>() / layer.heads.len().max(1) as f64
        };
        let overlap = layer.overlap.map_or("-".to_owned(), |overlap| format!("{overlap:.3}"));
        let mut line = format!(
            "{:5} {:>8.3} {:>9.3} {:>8.2} {:>8.1} {:>7.3} {:>7.3} {overlap:>8}",
            layer.layer,
            mean(&|head| head.density),
            mean(&|head| head.top_fifth),
            mean(&|head| head.entropy),
            mean(&|head| head.distance),
            mean(&|head| head.own),
            mean(&|head| head.first),
        );
        for &idx in &far {
            let beyond = mean(&|head| head.beyond[idx].unwrap_or(f64::NAN));
            let _ = write!(line, " {beyond:>7.3}");
        }
        let _ = write!(line, "  {}", layer.attention);
        lines.push(line);
        if let Some(chosen) = &layer.chosen {
            lines.push(format!(
                "      keys read: {:.1} tokens back, {:.1} % of them in a window of as many, {:.1} % of dense \
                 attention's weight",
                chosen.age,
                100.0 * chosen.in_window,
                100.0 * chosen.mass
            ));
        }
        if let Some(life) = &layer.life {
            let spans = life.percentiles.map_or("no key has left".to_owned(), |[low, middle, high]| {
                format!("of those that left, half stayed {middle} queries or fewer (10 %: {low}, 90 %: {high})")
            });
            lines.push(format!(
                "      keys: {:.1} % seen by no query, {:.1} % kept to the end; {spans}",
                100.0 * life.never,
                100.0 * life.to_the_end
            ));
        }
    }
    lines.push(
        "means over heads and queries: share of causal pairs with a weight; weight on the fifth of the keys with most \
         of it; nats; tokens back; weight on the own and on the first token; keys that two KV heads both see; weight \
         on keys farther back"
            .to_owned(),
    );
    lines
}

/// An SVG of the attention weights of every head, with the share of pairs it reads and, of DMA, how long keys stay.
fn picture(layers: &[LayerWeights], model: &str, length: usize) -> String {
    let squares = |layer: &LayerWeights| {
        let group = (layer.heads.len() / layer.lives.len().max(1)).max(1);
        let heads = layer.heads.iter().enumerate().map(|(idx, head)| {
            let stay = layer.lives.get(idx / group).and_then(|life| life.percentiles);
            let reads = format!("reads {:.0} %", 100.0 * head.density);
            let notes = [Some(reads), stay.map(|[_, middle, _]| format!("stays {middle}"))];
            square(&head.weights, length, notes.into_iter().flatten().collect())
        });
        (layer.layer, heads.collect())
    };
    let about = if layers.iter().any(|layer| !layer.lives.is_empty()) {
        "; stays: for how many queries, the median of DMA's keys that left"
    } else {
        ""
    };
    let picture = Heads {
        title: format!("Attention weights of {length} tokens"),
        about: format!("{model}; black is 1, by the logarithm; reads: of the causal pairs{about}"),
        num_tokens: length,
        layers: layers.iter().map(squares).collect(),
        legend: Legend::Scale(&[(0.0, "1"), (0.25, "0.1"), (0.5, "0.01"), (0.75, "0.001"), (1.0, "≤ 1e-4")]),
    };
    picture.svg()
}

/// Grey values of one head: black is weight 1, white is [`FAINTEST`] or less, logarithmic between them. A pixel that
/// covers several (query, key) pairs shows the largest weight. `weights` is `[length, length]`.
fn square(weights: &[f32], length: usize, notes: Vec<String>) -> Square {
    let side = length.min(PIXELS);
    let mut largest = vec![0.0_f32; side * side];
    for (query, row) in weights.chunks(length).enumerate() {
        for (key, &weight) in row.iter().enumerate() {
            let cell = &mut largest[query * side / length * side + key * side / length];
            *cell = cell.max(weight);
        }
    }
    let grey = |&weight: &f32| {
        let depth = 1.0 - (f64::from(weight).max(FAINTEST).ln() / FAINTEST.ln());
        255 - (255.0 * depth.clamp(0.0, 1.0)).round() as u8
    };
    Square { side, pixels: largest.iter().map(grey).collect(), notes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sieve_eval::KeyLifetimes;

    /// A layer of two heads that have these weights.
    fn layer(weights: Vec<f32>) -> LayerWeights {
        let head = HeadWeights {
            weights,
            density: 0.5,
            top_fifth: 0.9,
            entropy: 1.0,
            distance: 3.0,
            own: 0.2,
            first: 0.1,
            beyond: [Some(0.25), None, None, None],
        };
        LayerWeights {
            layer: 3,
            attention: "mha".to_owned(),
            heads: vec![head.clone(), head],
            overlap: Some(0.5),
            life: None,
            lives: Vec::new(),
            chosen: None,
        }
    }

    #[test]
    fn every_head_is_drawn_with_its_names() {
        let svg = picture(&[layer(vec![1.0, 0.0, 0.5, 0.5])], "run, step 3", 2);
        assert_eq!(svg.matches("<image").count(), 2);
        for word in ["layer 3", "head 0", "head 1", "2 tokens", "run, step 3", ">0.001<", ">reads 50 %<"] {
            assert!(svg.contains(word), "{word}");
        }
        assert!(!svg.contains("stays"));
    }

    #[test]
    fn a_head_of_dma_says_how_long_its_keys_stay() {
        let stay = |middle| KeyLifetimes { never: 0.0, to_the_end: 0.5, percentiles: Some([1, middle, 9]) };
        let mut dma = layer(vec![1.0, 0.0, 0.5, 0.5]);
        dma.lives = vec![stay(3), stay(7)];
        let svg = picture(&[dma], "run, step 3", 2);
        assert!(svg.contains(">stays 3<") && svg.contains(">stays 7<") && svg.contains("stays: for how many"), "{svg}");
    }

    #[test]
    fn distances_longer_than_the_prompt_have_no_column() {
        let lines = lines(&[layer(vec![0.0; 4])], 20);
        assert!(lines[0].contains("> 16") && !lines[0].contains("> 64"), "{}", lines[0]);
        assert!(lines[1].contains("0.250") && lines[1].ends_with("mha"), "{}", lines[1]);
    }
}
