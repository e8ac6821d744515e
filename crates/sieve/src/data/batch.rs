//! `sieve data batch`: the rows of one training step.
use crate::recipe::RecipeArgs;
use anyhow::{Result, bail};
use clap::Args;
use sieve_core::ShownPath;
use sieve_core::recipe::DataFormat;
use sieve_data::{DataError, OnChange, Prepared};
use sieve_hf::{NamedTensor, write_tensor_file};
use sieve_host::out_file::OutFile;
use sieve_host::terminal;
use sieve_train::{DataSource, initial_checkpoint};
use std::path::PathBuf;

/// Arguments of `sieve data batch`.
#[derive(Args, Debug)]
pub(crate) struct BatchArgs {
    #[command(flatten)]
    recipe: RecipeArgs,
    /// Which optimizer step, from 1
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    step: u64,
    /// The file to write
    #[arg(long, value_name = "FILE")]
    out: OutFile,
    /// Folder of the prepared data; as `sieve train` finds it when absent
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

/// Runs `sieve data batch`: prints or writes the rows that a training step would read.
pub(super) fn run(args: BatchArgs) -> Result<()> {
    let (recipe, text) = args.recipe.load_with_text()?;
    terminal::lines(text);
    let training = &recipe.training;
    anyhow::ensure!(
        args.step <= training.steps as u64,
        "--step {} is beyond the run's last step, training.steps = {}\n  hint: steps count from 1",
        args.step,
        training.steps
    );
    let dir = args.recipe.data_folder(&recipe, args.data_dir)?;
    if recipe.data.format != DataFormat::Mqar
        && let Err(DataError::File(missing)) = Prepared::open(&dir)
    {
        bail!(
            "no prepared data: {missing}\n  \
             hint: name a folder of sieve data prepare, or the data folder of a run, with --data-dir"
        );
    }
    // OnChange::Refuse: shards in this folder are never replaced, since a run may be reading them.
    let around = sieve_host::hub::surroundings();
    // A run that begins with a checkpoint reads the checkpoint's tokenizer.
    let source = DataSource::with_tokenizer_of(initial_checkpoint(&recipe)?.as_ref(), &recipe, &around)?;
    let mut data = source.prepare(&recipe, &dir, OnChange::Refuse, &mut |_event| {})?;
    let place = (dir.as_path(), OnChange::Refuse);
    let resumed = None;
    data.prepare_stages(&recipe, place, resumed, &around, &mut |_event| {})?;
    let batch = sieve_train::step_batch(&recipe, &data, args.step)?;
    let (rows, seq_len) = (batch.batch, batch.seq_len);
    let named = |name: &str, values: Vec<i32>| NamedTensor {
        name: name.to_owned(),
        data: burn::tensor::TensorData::new(values, [rows, seq_len]),
    };
    let signed = |values: &[u32]| values.iter().map(|&x| x as i32).collect::<Vec<i32>>();
    let tensors = [
        named("tokens", signed(&batch.tokens)),
        named("labels", batch.labels.clone()),
        named("documents", signed(&batch.documents)),
        named("doc_start", signed(&batch.doc_start)),
        named("doc_end", signed(&batch.doc_end)),
        named("positions", signed(&batch.positions)),
    ];
    args.out.write(|file| write_tensor_file(file, &tensors, None))?;
    terminal::line(&format!(
        "wrote step {}: {} rows x {} tokens, {} labels, to {}",
        args.step,
        rows,
        seq_len,
        batch.num_labels(),
        args.out.shown()
    ));
    Ok(())
}
