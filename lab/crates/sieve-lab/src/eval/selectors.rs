//! `sieve eval selectors`: sparse methods side by side on one dense checkpoint.
mod compare;
mod heat_map;
mod labels;
mod plot;
mod run;
mod scores;
mod table;

use anyhow::{Context, Result, bail};
pub(crate) use run::SelectorsArgs;
use run::{COMMAND, Failures, Run};
use sieve_core::{ModelShape, ShownPath};
use sieve_eval::{
    BlockAgreement, READY_GRIDS, block_agreement, measure_selectors, selector_grid, selector_masks, sweep_selectors,
};
use sieve_hf::Kept;
use sieve_host::evaluation::{output, so_far, text};
use sieve_host::line_chart::Curve;
use sieve_host::loaded::on_device;
use sieve_host::once::once;
use sieve_host::out_file::{PictureFile, write_text};
use sieve_host::{hub, loaded, selector, terminal};
use sieve_infer::{InferError, Selection};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use sieve_select::{ENTRIES, LayerSelectors, Phase, Selector};
use std::path::Path;

/// Tokens of the prompts where the user names no length.
const USUAL_LENGTH: usize = 1024;

/// Runs `sieve eval selectors`: what each selector keeps and costs on a checkpoint, beside dense attention.
pub(crate) fn run(mut args: SelectorsArgs) -> Result<()> {
    args.checkpoint = hub::folder(&args.checkpoint)?;
    if args.lengths.is_empty() {
        let context = sieve_hf::peek_model(&args.checkpoint).map(|(_, shape)| shape.max_seq_len);
        args.lengths = vec![context.unwrap_or(USUAL_LENGTH).min(USUAL_LENGTH)];
    }
    if args.lengths.iter().any(|&length| length < 2) || args.windows == 0 {
        bail!("--lengths and --windows must be positive\n  hint: prompts need at least 2 tokens");
    }
    let lengths = args.lengths.iter().map(ToString::to_string).collect::<Vec<_>>();
    let compared = args.compare.iter().map(|path| path.shown().to_string()).collect::<Vec<_>>();
    once("--lengths", &lengths)?;
    once("--compare", &compared)?;
    args.result.check(&args.checkpoint, COMMAND, args.draws())?;
    let place = (args.place).for_checkpoint(&args.checkpoint, |_, _| {
        let longest = args.lengths.iter().max().copied().unwrap_or(0);
        InferenceSize::rows_of(longest, longest)
    })?;
    on_device!(place, run_on(&args))
}

/// Measures every selector at every length, then prints the tables and writes the pictures. A selector or a picture
/// that fails does not stop the others.
fn run_on<B: DeviceBackend>(args: &SelectorsArgs, device: &B::Device, kept: Kept) -> Result<()> {
    let (loaded, tokenizer) = loaded::load::<B>(&args.checkpoint, device, kept)?;
    let (selectors, left_out) = selectors(args, &loaded.shape)?;
    let selections: Vec<Selection> = selectors
        .iter()
        .map(|selector| selector::selection(selector, args.chunk, &loaded.shape))
        .collect::<Result<_>>()?;
    let longest = args.lengths.iter().max().copied().unwrap_or(0);
    let compared = compare::load::<B>(&args.compare, &tokenizer, longest, device, kept)?;
    let tokens = text::tokens(&args.data, &tokenizer, longest, args.windows)?;
    let labels = labels::of(&selectors);
    let (mut rows, mut trained, mut failed) = (Vec::new(), Vec::new(), Failures::default());
    for &length in &args.lengths {
        let windows = text::windows(&tokens, length, args.windows);
        // The first prompt is read twice: the first time is a warm-up.
        let total = (selections.len() * (windows.len() + 1)) as u64;
        let what = format!("prompts of {length} tokens under a method");
        let found = so_far::with_bar(total, &what, |bar| {
            let mut observe = |name: &str| {
                so_far::now(format!("{name} is being measured"));
                bar.inc(1);
            };
            measure_selectors(&loaded.model, &windows, &selections, device, &mut observe)
        })?;
        for (label, measure) in labels.iter().zip(found) {
            match measure {
                Ok(measure) => {
                    let (density, loss) = (measure.density, measure.loss);
                    so_far::done(format!("{label} at {length} tokens: density {density:.3}, loss {loss:.4}"));
                    rows.push(table::Row { label: label.clone(), measure });
                }
                Err(error) => failed.add(label, &format!("{length} tokens"), &error.into()),
            }
        }
        trained.extend(compare::measure(&compared, &windows, device)?);
    }
    let run =
        Run { args, loaded: &loaded, tokens: &tokens[..=longest], selectors: &selectors, labels: &labels, device };
    let agreement = run.agreement()?;
    if !args.result.json {
        table::print(&run, &rows, &trained, &left_out);
        terminal::lines(agreement.iter().map(table::agreement_line));
    }
    // An error of a file names it.
    if let Some(path) = &args.plot
        && let Err(error) = run.draw(path, &mut failed)
    {
        failed.add("--plot", "curve", &error);
    }
    if let Some(path) = &args.scores {
        path.write_text(&scores::svg(&run, &rows, &trained))?;
        run.say(&format!("wrote {}", path.shown()));
    }
    if let Some(dir) = &args.maps
        && let Err(error) = run.draw_maps(dir, &mut failed)
    {
        failed.add("--maps", "map", &error);
    }
    table::report(&run, &rows, &trained, &left_out, (&agreement, &failed))?;
    failed.end(args.result.json)
}

/// The selectors to measure, and errors for selectors that this model does not take. They come from `--selector` and
/// `--grid`; without either, all prefill methods.
fn selectors(args: &SelectorsArgs, shape: &ModelShape) -> Result<(Vec<LayerSelectors>, Vec<anyhow::Error>)> {
    let mut asked = args.selector.clone();
    if asked.is_empty() {
        InferError::require_dense("every method", shape)?;
    }
    let (candidates, mut left_out) = match &args.grid {
        Some(grid) => read_grid(grid)?,
        None if asked.is_empty() => (all_prefill(args.chunk)?, Vec::new()),
        None => (Vec::new(), Vec::new()),
    };
    for selectors in candidates {
        match selector::selection(&selectors, args.chunk, shape) {
            Ok(_) => asked.push(selectors),
            Err(error) => left_out.push(error),
        }
    }
    if asked.is_empty()
        && let Some(error) = left_out.pop()
    {
        return Err(error);
    }
    Ok((asked, left_out))
}

/// Reads `--grid`: a TOML file, or a grid that comes with the program. Also returns why combinations were left out.
fn read_grid(path: &Path) -> Result<(Vec<LayerSelectors>, Vec<anyhow::Error>)> {
    let shown = path.shown().to_string();
    let ready = READY_GRIDS.iter().find(|(name, _)| *name == shown);
    let text = match (sieve_files::read_text(path), ready) {
        (Ok(text), _) => text,
        (Err(_), Some((_, text))) => (*text).to_owned(),
        (Err(error), None) => {
            let names = READY_GRIDS.map(|(name, _)| name).join(", ");
            bail!("--grid {shown}: {error}\n  hint: name a TOML file, or one of {names}");
        }
    };
    let (found, forbidden) = selector_grid(&shown, &text)?;
    Ok((found, forbidden.into_iter().map(Into::into).collect()))
}

/// Every prefill method with its defaults, with two exceptions. No first layers stay dense, since small models have few
/// layers. Calls as short as a chunk are made sparse too.
fn all_prefill(chunk: Option<usize>) -> Result<Vec<LayerSelectors>> {
    let prefill = ENTRIES.iter().filter(|entry| entry.phase != Phase::Decode);
    prefill
        .map(|entry| {
            let mut selector = Selector::parse(entry.name)?;
            selector.common.first_dense_layers = 0;
            let shortest = &mut selector.common.min_prefill_tokens;
            *shortest = chunk.map_or(*shortest, |chunk| chunk.min(*shortest));
            Ok(selector.into())
        })
        .collect()
}

impl<B: DeviceBackend> Run<'_, B> {
    /// What `--agreement` asks for, of each `ba_att` among the selectors.
    fn agreement(&self) -> Result<Vec<BlockAgreement>> {
        if !self.args.agreement {
            return Ok(Vec::new());
        }
        let found = block_agreement(&self.loaded.model, self.tokens, self.selectors, self.device)?;
        let found: Vec<BlockAgreement> = found.into_iter().flatten().collect();
        if found.is_empty() {
            bail!("--agreement: no selector is ba_att in a dense layer\n  hint: add --selector ba_att");
        }
        Ok(found)
    }

    /// Writes one heat map for each prefill selector.
    fn draw_maps(&self, dir: &Path, failed: &mut Failures) -> Result<()> {
        let all = self.selectors.iter().zip(self.labels);
        let (selectors, labels): (Vec<LayerSelectors>, Vec<String>) = all
            .filter(|(selectors, _)| selectors.iter().all(|one| one.phase() != Phase::Decode))
            .map(|(selectors, label)| (selectors.clone(), label.clone()))
            .unzip();
        let masks = selector_masks(&self.loaded.model, self.tokens, &selectors, self.device)?;
        std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.shown()))?;
        let mut written = 0;
        for ((label, name), masks) in labels.iter().zip(labels::file_names(&labels)).zip(masks) {
            let masks = match masks {
                Ok(masks) => masks,
                Err(error) => {
                    failed.add(label, "map", &error.into());
                    continue;
                }
            };
            let path = dir.join(format!("{name}.svg"));
            write_text(&path, &heat_map::svg(label, &output::model_name(self.loaded), &masks))?;
            written += 1;
        }
        self.say(&format!("wrote {written} maps into {}", dir.shown()));
        Ok(())
    }

    /// Draws one curve for each method and setting. Its points are the values of the method's knob: the parameter that
    /// trades density for recall.
    fn draw(&self, path: &PictureFile, failed: &mut Failures) -> Result<()> {
        let mut curves = Vec::new();
        for sweep in self.sweeps() {
            let of = |selector: &Selector| {
                let selectors = selector.clone().into();
                selector::selection(&selectors, self.args.chunk, &self.loaded.shape)
            };
            let moved: Result<Vec<Selection>> = sweep.selectors.iter().map(of).collect();
            let moved = match moved {
                Ok(moved) => moved,
                Err(error) => {
                    failed.add(&sweep.label, "curve", &error);
                    continue;
                }
            };
            let mut points = Vec::new();
            for point in sweep_selectors(&self.loaded.model, self.tokens, &moved, self.device)? {
                match point {
                    Ok(point) => points.push(point),
                    Err(error) => failed.add(&sweep.label, "curve", &error.into()),
                }
            }
            curves.push(Curve { name: sweep.label, points, errors: Vec::new() });
        }
        let title = format!("Selectors at {} tokens: {}", self.tokens.len() - 1, output::model_name(self.loaded));
        path.write_text(&plot::svg(&title, curves))?;
        self.say(&format!("wrote {}", path.shown()));
        Ok(())
    }

    /// The curves. Selectors that differ only in the knob's value are points of one curve; its label leaves that value
    /// out.
    fn sweeps(&self) -> Vec<Sweep> {
        let mut sweeps: Vec<(Vec<Selector>, Sweep)> = Vec::new();
        for selector in self.selectors.iter().filter_map(LayerSelectors::only) {
            // A method without a knob has no curve.
            let Some(key) = selector.knob() else {
                continue;
            };
            let values = selector.sweep();
            let index = sweeps.iter().position(|(others, _)| *others == values);
            let index = index.unwrap_or_else(|| {
                let label = format!("{} ({key})", selector.label_without(key));
                let selectors = values.clone();
                sweeps.push((values, Sweep { label, selectors }));
                sweeps.len() - 1
            });
            let points = &mut sweeps[index].1.selectors;
            if !points.contains(selector) {
                points.push(selector.clone());
            }
        }
        sweeps.into_iter().map(|(_, sweep)| sweep).collect()
    }
}

/// The selectors of one curve, which differ in one key.
struct Sweep {
    label: String,
    selectors: Vec<Selector>,
}
