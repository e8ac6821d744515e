//! `--extrapolate`: the loss on the same tokens after contexts longer than a row in training.
use super::{BATCH_TOKENS, PplArgs, prepared_data};
use anyhow::{Result, bail};
use sieve_data::Tokenizer;
use sieve_hf::LoadedModel;
use sieve_host::evaluation::so_far;
use sieve_host::terminal;
use sieve_infer::{EvalDocument, Extrapolation, InferError, extrapolation, prepared_documents, text_documents};
use sieve_ops::DeviceBackend;

/// Lengths of the contexts, in multiples of a training row.
const FACTORS: [usize; 3] = [1, 2, 4];

/// Measures the loss on the same tokens after each context of [`FACTORS`] that the model has positions for.
pub(super) fn measure<B: DeviceBackend>(
    args: &PplArgs,
    loaded: &LoadedModel<B>,
    tokenizer: &Tokenizer,
    device: &B::Device,
) -> Result<Vec<Extrapolation>> {
    let recipe = &loaded.recipe;
    let stages = recipe.stage.iter().map(|stage| stage.seq_len);
    let trained = stages.fold(recipe.training.seq_len, usize::max);
    let most = loaded.shape.max_seq_len;
    let contexts = FACTORS.map(|factor| factor * trained);
    let contexts: Vec<_> = contexts.into_iter().filter(|it| *it <= most).collect();
    if contexts.len() < 2 {
        let further = match loaded.state.step {
            // An import, which is no run.
            0 => "sieve train --branch-from CHECKPOINT".to_owned(),
            step => format!("sieve train --resume (of a finished run with --extend {})", step + 1),
        };
        bail!(
            "--extrapolate needs positions beyond the {trained} tokens of a row in training, and the model \
             has {most}\n  \
             hint: positions have no weights, but the checkpoint's recipe names their number: train a step more by \
             {further} and --set model.max_position_embeddings={}",
            4 * trained
        );
    }
    // Each piece predicts half a training row.
    let max_pieces = match args.max_tokens {
        Some(most) => most.div_ceil(trained.div_ceil(2) as u64).max(1) as usize,
        None => usize::MAX,
    };
    let run = |documents: &mut dyn Iterator<Item = Result<EvalDocument, InferError>>| {
        so_far::with_bar(0, "tokens after longer contexts", |bar| {
            let (model, sizes) = (&loaded.model, (BATCH_TOKENS, max_pieces));
            let mut observe = |num_tokens| bar.set_position(num_tokens);
            extrapolation(model, documents, &contexts, sizes, device, &mut observe)
        })
    };
    Ok(if args.recipe_validation {
        run(&mut prepared_documents(&prepared_data(loaded)?, tokenizer)?)?
    } else {
        let corpus = args.corpus(loaded)?;
        let eos_id = tokenizer.eos_id()?;
        run(&mut text_documents(corpus.documents(), tokenizer, eos_id))?
    })
}

/// Prints a line for each context length.
pub(super) fn print(measured: &[Extrapolation]) {
    let Some(first) = measured.first() else {
        return;
    };
    terminal::line(&format!(
        "\nthe same {} tokens, behind a context of\ntokens         loss   perplexity    ratio",
        terminal::thousands(first.num_tokens)
    ));
    for row in measured {
        terminal::line(&format!(
            "{:<10} {:>8.4} {:>12} {:>8.4}",
            terminal::thousands(row.context as u64),
            row.loss,
            terminal::perplexity(row.perplexity, 3),
            row.ratio
        ));
    }
}
