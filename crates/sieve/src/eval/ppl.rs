//! `sieve eval ppl`: perplexity and bits per byte on text.
mod answers;
mod extrapolation;

use crate::data::account;
use anyhow::{Result, bail};
use clap::{ArgGroup, Args};
use serde_json::json;
use sieve_core::{ShownPath, covered_words};
use sieve_data::{Corpus, Prepared};
use sieve_hf::{Kept, LoadedModel, peek_model};
use sieve_host::evaluation::{output, so_far, text};
use sieve_host::exit::Exit;
use sieve_host::line_chart::{self, Axis, Curve, Plot};
use sieve_host::loaded::{PlaceArgs, on_device};
use sieve_host::model_ranks::{ModelBackend, ModelRanks, PlacedModel, own_place, with_ranks};
use sieve_host::out_file::PictureFile;
use sieve_host::same_bits::SameBitsArgs;
use sieve_host::text_files::FormatArg;
use sieve_host::{hub, loaded, selector, terminal};
use sieve_infer::{
    EvalDocument, Extrapolation, InferError, MeanLoss, PerplexityConfig, PerplexityReport, PositionLoss,
    RollingPerplexity, Selection, first_tokens, perplexity, prepared_documents, text_documents,
};
use sieve_ops::DeviceBackend;
use sieve_plan::InferenceSize;
use std::path::PathBuf;

/// Tokens of one forward pass; more would take memory and gain no time.
const BATCH_TOKENS: usize = 8192;

/// With more tokens a word than this on average, word perplexity is not printed: it is about the token perplexity to
/// the power of that number, and says little.
const TOKENS_PER_WORD: f64 = 2.0;

/// Name under which `--save` keeps the result.
const COMMAND: &str = "ppl";

/// Arguments of `sieve eval ppl`.
#[derive(Args, Debug)]
#[command(group = ArgGroup::new("source").required(true).args(["data", "recipe_validation"]))]
pub(crate) struct PplArgs {
    /// A checkpoint (step-N), or a run folder: then its latest; or hf://OWNER/NAME
    #[arg(long, value_name = "DIR")]
    checkpoint: PathBuf,
    /// Text, JSONL or Parquet files, folders or globs
    #[arg(long, num_args = 1.., value_name = "PATH")]
    data: Vec<String>,
    /// All documents that the run held out; its own validation reads validation.tokens of them
    #[arg(long)]
    recipe_validation: bool,
    /// How the files hold documents; by their ending when absent
    #[arg(long, value_enum, conflicts_with = "recipe_validation")]
    format: Option<FormatArg>,
    /// JSONL and Parquet: the column that holds a document's text; when absent, the columns of a run on chats or on
    /// prompts, else "text", or "messages" for a model with a chat template
    #[arg(long, value_name = "NAME", conflicts_with = "recipe_validation")]
    text_column: Option<String>,
    /// Leave out documents that cannot be read (not UTF-8, no such column), and print how many
    #[arg(long, conflicts_with = "recipe_validation")]
    skip_invalid: bool,
    /// Also predict the same tokens after contexts of one, two and four training rows, and print the ratios of the
    /// perplexities; up to the model's context. --max-tokens does not limit these
    #[arg(long, conflicts_with_all = ["selector", "chunk", "stream"])]
    extrapolate: bool,
    /// Tokens the model sees at most; the length it was trained with when absent
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens between the windows of a long document; half the context when absent, or with --by-position and --plot
    /// the context, so that predictions see every number of tokens up to it
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// Predict N tokens at most; the last document is cut there
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_tokens: Option<u64>,
    /// Also print the loss by the number of tokens that a prediction sees
    #[arg(long)]
    by_position: bool,
    /// Draw the loss by the number of tokens that a prediction sees
    #[arg(long, value_name = "FILE")]
    plot: Option<PictureFile>,
    /// Also print the loss on words last used more than N tokens back, and on all others; several N may follow
    #[arg(long, num_args = 1.., value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    far: Vec<u32>,
    #[command(flatten)]
    sparse: selector::SelectorArgs,
    #[command(flatten)]
    same_bits: SameBitsArgs,
    #[command(flatten)]
    result: output::ResultArgs,
    #[command(flatten)]
    place: PlaceArgs,
}

/// Runs `sieve eval ppl`: perplexity and bits per byte on a text.
pub(crate) fn run(args: PplArgs) -> Result<Exit> {
    with_ranks(|ranks| run_as(args, ranks))
}

/// Runs the command as one process, or as one of `ranks`.
fn run_as(mut args: PplArgs, ranks: Option<&ModelRanks>) -> Result<()> {
    args.checkpoint = hub::folder(&args.checkpoint)?;
    args.result.check(&args.checkpoint, COMMAND, args.plot.is_some())?;
    let place = own_place(args.place, ranks)?.for_checkpoint(&args.checkpoint, |recipe, _| {
        let context = args.context.unwrap_or(recipe.training.seq_len).max(1);
        InferenceSize { ranks: ranks.map_or(1, ModelRanks::size), ..InferenceSize::rows_of(context, BATCH_TOKENS) }
    })?;
    let shape = || Ok(peek_model(&args.checkpoint)?.1);
    args.same_bits.check(&place.device, args.sparse.selector.is_some(), shape)?;
    on_device!(place, run_on(&args, ranks))
}

fn run_on<B: ModelBackend>(args: &PplArgs, ranks: Option<&ModelRanks>, device: &B::Device, kept: Kept) -> Result<()> {
    let mut placed = PlacedModel::<B>::load(&args.checkpoint, device, kept, ranks)?;
    placed.loaded = args.same_bits.of(placed.loaded);
    placed.checked(measure(args, &placed.loaded, ranks.is_none_or(ModelRanks::prints), device))
}

/// Measures a model; `prints` says whether this process prints the result and writes its files.
fn measure<B: DeviceBackend>(args: &PplArgs, loaded: &LoadedModel<B>, prints: bool, device: &B::Device) -> Result<()> {
    let tokenizer = loaded::tokenizer(&loaded.tokenizer_path, &loaded.recipe, &loaded.shape)?;
    let context = args.context.unwrap_or(loaded.recipe.training.seq_len);
    let usual_stride = if args.by_position || args.plot.is_some() { context } else { context.div_ceil(2) };
    let config = PerplexityConfig {
        context,
        stride: args.stride.unwrap_or(usual_stride),
        batch_tokens: BATCH_TOKENS,
        far: args.far.iter().map(|&border| border as usize).collect(),
        rolling_prefix: Some(tokenizer.prefix_id()?),
        rolling_bos: tokenizer.bos_id(),
    };
    config.check(loaded.shape.max_seq_len)?;
    if args.context.is_none() && !loaded.says_row() {
        let tokens = terminal::counted(context as u64, "token");
        terminal::remark(&format!(
            "note: the model's folder does not say how long its rows of training were; the context is {tokens} \
             (--context N is another)"
        ));
    }
    if context != loaded.recipe.training.seq_len && loaded.shape.attention.covers_rows(context) {
        terminal::remark(&format!("note: --context {context}: attention {}", covered_words(context)));
    }
    let mut selection = args.sparse.selection(&loaded.shape)?;
    // First, because it may refuse the model or the documents.
    let extrapolation =
        if args.extrapolate { extrapolation::measure(args, loaded, &tokenizer, device)? } else { Vec::new() };
    let chosen = selection.as_mut();
    let report = if args.recipe_validation {
        let prepared = prepared_data(loaded)?;
        // The first token of a document is not predicted.
        let held_out = &prepared.meta.validation;
        let total = held_out.num_predicted.unwrap_or(held_out.num_tokens - held_out.num_documents);
        let total = total.min(args.max_tokens.unwrap_or(total));
        let documents = prepared_documents(&prepared, &tokenizer)?;
        let documents = first_tokens(documents, &tokenizer, args.max_tokens);
        with_progress(loaded, documents, &config, device, chosen, Some(total))?
    } else {
        let corpus = args.corpus(loaded)?;
        let mut read = corpus.documents();
        let documents = text_documents(read.by_ref(), &tokenizer, tokenizer.eos_id()?);
        let documents = first_tokens(documents, &tokenizer, args.max_tokens);
        let report = with_progress(loaded, documents, &config, device, chosen, args.max_tokens)?;
        let mut lines = Vec::new();
        account::left_out("", read.report(), &mut lines);
        lines.iter().for_each(|line| terminal::remark(line));
        report
    };
    if !prints {
        return Ok(());
    }
    if let Some(path) = &args.plot {
        let title = format!("Loss by tokens seen: {}", output::model_name(loaded));
        path.write_text(&loss_by_position(&title, &report.by_position, report.loss))?;
    }
    print(args, loaded, &config, &report, selection.as_ref(), &extrapolation)
}

impl PplArgs {
    /// The documents of `--data`. With `--text-column`, the text of that column. Without it, the columns that the model
    /// was trained on (chats, or prompts and answers, of which only the answers are predicted), or else the column
    /// "text".
    fn corpus<B: DeviceBackend>(&self, loaded: &LoadedModel<B>) -> Result<Corpus> {
        let text_column = self.text_column.as_deref().unwrap_or("text");
        let corpus = text::open(&self.data, self.format, text_column, self.skip_invalid)?;
        match self.text_column {
            Some(_) => Ok(corpus),
            None => answers::with_columns_of(corpus, loaded),
        }
    }
}

/// An SVG of the loss by the number of tokens seen, in bins that begin at powers of two. A second line is the mean
/// loss. A bar is two standard errors up and down, and the axis holds all bars.
fn loss_by_position(title: &str, by_position: &[PositionLoss], mean_loss: f64) -> String {
    let bins = by_position.iter().filter(|bin| bin.mean.num_tokens > 0);
    let errors: Vec<_> = bins.clone().map(|bin| 2.0 * bin.mean.standard_error).collect();
    let points: Vec<_> = bins.map(|bin| (f64::from(bin.from.max(1).ilog2()), bin.mean.loss)).collect();
    let mean = (points.iter()).map(|(power, _)| (*power, mean_loss));
    let bars = points.iter().zip(&errors).map(|((_, loss), error)| [loss - error, loss + error]);
    let low = bars.clone().map(|[low, _]| low).fold(mean_loss, f64::min).floor();
    let high = bars.map(|[_, high]| high).fold(mean_loss, f64::max).ceil().max(low + 1.0);
    let curve = |name: &str, points, errors| Curve { name: name.to_owned(), points, errors };
    let mean = curve("all tokens", mean.collect(), Vec::new());
    let curves = vec![curve("by tokens seen, ± 2 s.e.", points, errors), mean];
    line_chart::svg(&Plot {
        title,
        x: Axis::powers_of_two("tokens seen, at least", &curves),
        y: Axis {
            label: "loss, nats per token",
            range: low..high,
            most_numbers: 6,
            text: &|loss| format!("{loss:.1}"),
        },
        curves,
    })
}

/// Measures perplexity with a progress bar; `total` is the number of tokens to predict, if known.
fn with_progress<B: DeviceBackend>(
    loaded: &LoadedModel<B>,
    documents: impl Iterator<Item = Result<EvalDocument, InferError>>,
    config: &PerplexityConfig,
    device: &B::Device,
    selection: Option<&mut Selection>,
    total: Option<u64>,
) -> Result<PerplexityReport> {
    let report = so_far::with_bar(total.unwrap_or(0), "tokens", |bar| {
        let mut observe = |num_tokens, loss: f64| {
            bar.set_position(num_tokens);
            so_far::now(format!("loss {loss:.4}, perplexity {}", terminal::perplexity(loss.exp(), 2)));
        };
        perplexity(&loaded.model, documents, config, device, selection, &mut observe)
    })?;
    Ok(report)
}

/// The prepared data of the run that wrote the checkpoint.
fn prepared_data<B: DeviceBackend>(loaded: &LoadedModel<B>) -> Result<Prepared> {
    if loaded.recipe.data.mqar.is_some() {
        bail!("the run drew samples of MQAR and has no documents\n  hint: sieve eval mqar asks for their pairs");
    }
    let (dir, hint) = match &loaded.recipe.data.cache_dir {
        Some(dir) => (
            PathBuf::from(sieve_core::paths::expand(dir, &sieve_host::environment::variable)?),
            "run this where the recipe's data.cache_dir leads to them",
        ),
        None => (
            output::run_folder(&loaded.path, &loaded.recipe.checkpoint.folder)
                .unwrap_or_else(|| loaded.path.clone())
                .join("data"),
            "keep the checkpoint in its run folder",
        ),
    };
    if !dir.join("meta.json").exists() {
        bail!("the held-out documents of the run are not in {}\n  hint: {hint}, or name text with --data", dir.shown());
    }
    Ok(Prepared::open(&dir)?)
}

/// Prints the result as tables or as one JSON object.
fn print<B: DeviceBackend>(
    args: &PplArgs,
    loaded: &LoadedModel<B>,
    config: &PerplexityConfig,
    report: &PerplexityReport,
    selection: Option<&Selection>,
    extrapolation: &[Extrapolation],
) -> Result<()> {
    let mut object = serde_json::to_value(report)?;
    if !extrapolation.is_empty() {
        object["extrapolation"] = json!(extrapolation);
    }
    if let Some(selection) = selection {
        selector::report(selection, &mut object);
        // Such a method chooses a query's keys by later queries too, so the loss is no likelihood.
        object["prefill_perplexity"] = (!selection.selectors().is_causal_map()).into();
    }
    if args.result.report(loaded, COMMAND, object)? {
        return Ok(());
    }
    print_totals(loaded, report);
    if let Some(rolling) = &report.lm_eval_rolling {
        print_rolling(config, report.context, rolling);
    }
    print_breakdowns(args, report);
    extrapolation::print(extrapolation);
    if let Some(selection) = selection {
        terminal::line(&selector::summary(selection));
        if !selection.selectors().is_causal_map() {
            terminal::line(
                "this is prefill perplexity: the method also uses later queries to choose a query's keys, so these are \
                 not likelihoods",
            );
        }
    }
    if let Some(path) = &args.plot {
        terminal::line(&format!("wrote {}", path.shown()));
    }
    Ok(())
}

/// Prints counts, loss and perplexities of the whole text.
fn print_totals<B: DeviceBackend>(loaded: &LoadedModel<B>, report: &PerplexityReport) {
    let count = terminal::thousands;
    let of_answers = report.num_read_tokens.map_or(String::new(), |num_read| {
        format!("loss over answer tokens only: {} of {} tokens\n", count(report.num_tokens), count(num_read))
    });
    terminal::line(&format!(
        "{}, context {}, stride {}\n\
         {of_answers}documents         {:>14}\n\
         predicted tokens  {:>14}\n\
         words             {:>14}\n\
         bytes             {:>14}\n\
         loss              {:>14.4}  nats per token\n\
         token perplexity  {:>14}\n\
         {}\n\
         {}",
        output::heading(loaded),
        report.context,
        report.stride,
        count(report.num_documents),
        count(report.num_tokens),
        count(report.num_words),
        count(report.num_bytes),
        report.loss,
        terminal::perplexity(report.token_perplexity, 3),
        word_line(report.word_perplexity, report.num_tokens, report.num_words),
        byte_lines(report.byte_perplexity, report.bits_per_byte),
    ));
    if let Some(speed) = report.tokens_per_second {
        let speed = count(speed as u64);
        terminal::line(&format!("tokens a second   {speed:>14}  from the second forward pass on"));
    }
}

/// Prints the perplexities by lm-evaluation-harness's definition, for windows of `context` tokens.
fn print_rolling(config: &PerplexityConfig, context: usize, rolling: &RollingPerplexity) {
    let before = match config.rolling_bos {
        Some(_) => "two BOS tokens, the second one predicted,",
        None => "an end-of-document token",
    };
    terminal::line(&format!(
        "\nby lm-evaluation-harness's rolling likelihood ({before} before each text, none predicted after it; \
         windows of {context})\n\
         {}\n\
         {}",
        word_line(rolling.word_perplexity, rolling.num_tokens, rolling.num_words),
        byte_lines(rolling.byte_perplexity, rolling.bits_per_byte),
    ));
}

/// Prints the tables of `--by-position` and `--far`.
fn print_breakdowns(args: &PplArgs, report: &PerplexityReport) {
    let count = terminal::thousands;
    if args.by_position {
        terminal::line("\ntokens seen                 tokens     loss");
        for bin in &report.by_position {
            let range = format!("{} to {}", count(bin.from as u64), count(bin.to as u64 - 1));
            terminal::line(&mean_line(&range, &bin.mean));
        }
    }
    if !args.far.is_empty() {
        terminal::line("\ntokens of words             tokens     loss");
        for far in &report.by_word.again {
            let border = count(far.more_than as u64);
            terminal::line(&mean_line(&format!("used > {border} back"), &far.far));
            terminal::line(&mean_line(&format!("used <= {border} back"), &far.near));
        }
        terminal::line(&mean_line("new in the context", &report.by_word.new));
        terminal::line(&mean_line("no word", &report.by_word.no_word));
    }
}

/// The printed line of the word perplexity, which is left out with more than [`TOKENS_PER_WORD`] tokens a word.
fn word_line(word_perplexity: Option<f64>, num_tokens: u64, num_words: u64) -> String {
    let tokens_per_word = num_tokens as f64 / num_words as f64;
    let (number, why) = match word_perplexity {
        None => ("-".to_owned(), "  the text has no word".to_owned()),
        Some(_) if tokens_per_word > TOKENS_PER_WORD => {
            let why = format!(
                "  left out: a word has {tokens_per_word:.1} tokens here, more than {TOKENS_PER_WORD}; --json has it"
            );
            ("-".to_owned(), why)
        }
        Some(number) => (terminal::perplexity(number, 3), String::new()),
    };
    format!("word perplexity   {number:>14}{why}")
}

/// The printed lines of what is measured by bytes of text.
fn byte_lines(byte_perplexity: Option<f64>, bits_per_byte: Option<f64>) -> String {
    let why = if bits_per_byte.is_none() { "  the predicted tokens have no text" } else { "" };
    let perplexity = byte_perplexity.map_or("-".to_owned(), |number| terminal::perplexity(number, 4));
    let bits = bits_per_byte.map_or("-".to_owned(), |bits| format!("{bits:.4}"));
    format!("byte perplexity   {perplexity:>14}{why}\nbits per byte     {bits:>14}{why}")
}

fn mean_line(what: &str, mean: &MeanLoss) -> String {
    let num_tokens = terminal::thousands(mean.num_tokens);
    match mean.num_tokens {
        0 => format!("{what:<20}{num_tokens:>14}        -"),
        _ => format!("{what:<20}{num_tokens:>14} {:>8.4}", mean.loss),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bin_of_the_picture_has_an_error_bar() {
        let bin = |from: usize, loss: f64, standard_error: f64| PositionLoss {
            from,
            to: 2 * from,
            mean: MeanLoss { num_tokens: 9, loss, standard_error },
        };
        let by_position = [bin(1, 3.0, 0.2), bin(2, 2.5, 0.1), bin(4, 2.25, 0.0)];
        let plain = loss_by_position(
            "t",
            &by_position.map(|bin| PositionLoss { mean: MeanLoss { standard_error: 0.0, ..bin.mean }, ..bin }),
            2.5,
        );
        let drawn = loss_by_position("t", &by_position, 2.5);
        // A bar is a line with a cap at each end.
        assert_eq!(drawn.matches("<polyline").count(), plain.matches("<polyline").count());
        assert_ne!(drawn, plain);
        // Losses are 2.25 to 3: a bar from 0.8 to 5.2 ends inside the axis, and is not cut off at it.
        let wide = loss_by_position(
            "t",
            &by_position.map(|bin| PositionLoss { mean: MeanLoss { standard_error: 1.1, ..bin.mean }, ..bin }),
            2.5,
        );
        assert!(wide.contains("\n0.0\n") && wide.contains("\n6.0\n") && !plain.contains("\n4.0\n"), "{wide}");
    }

    #[test]
    fn word_perplexity_is_printed_where_words_are_about_tokens() {
        let line = |num_tokens| word_line(Some(459_799.609), num_tokens, 100);
        assert!(line(200).contains("459799.609"));
        assert!(line(241).contains(" -  left out: a word has 2.4 tokens") && !line(241).contains("459799"));
        assert!(word_line(None, 7, 0).ends_with(" -  the text has no word"));
    }
}
