//! Models of the Hugging Face hub, where a command takes the folder of a model, or a checkpoint to begin with.
use crate::environment::variable;
use crate::terminal::{self, DownloadBar, FolderBar};
use anyhow::{Context, Result};
use burn_flex::{Flex, FlexDevice};
use sieve_comm::World;
use sieve_core::recipe::AttentionKind;
use sieve_core::{Refusal, ShownPath};
use sieve_data::{DownloadProgress, HubConfig, HubModel, HubModelEvent, Surroundings, hub_model, is_hub_model};
use sieve_files::lock_or_wait;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Checkpoints of models of the hub that this process found, by the models' names.
static CHECKPOINTS: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());

/// What reading data sets and tokenizers of the hub needs of this process: its environment variables, and a bar for
/// each file.
pub fn surroundings() -> Surroundings<'static> {
    if !prints() {
        return Surroundings::unseen(&variable);
    }
    let bar = DownloadBar::default();
    let see_download = Arc::new(move |progress: DownloadProgress<'_>| {
        bar.see(progress.name, progress.num_fetched, progress.num_bytes);
    });
    Surroundings { variable: &variable, see_download }
}

/// Whether this process prints: of several ranks only rank 0 does.
fn prints() -> bool {
    World::from_env(&variable).ok().flatten().is_none_or(|world| world.rank == 0)
}

/// The folder of the model that a flag names: a path is itself, and `hf://OWNER/NAME` is fetched into the cache.
pub fn folder(path: &Path) -> Result<PathBuf> {
    Ok(model(path)?.map_or_else(|| path.to_owned(), |model| model.path))
}

/// The model of the hub that `path` names, fetched unless the cache has it; `None` for a path of this disk.
pub fn model(path: &Path) -> Result<Option<HubModel>> {
    let prints = prints();
    if !is_hub_model(path) {
        return Ok(None);
    }
    let remark = |words: &str| {
        if prints {
            terminal::remark(words);
        }
    };
    let accepts = |config: &Path| {
        sieve_hf::check_config(config).map_err(|error| Refusal::of_text(&error.to_string(), "name another model"))
    };
    let mut bar: Option<FolderBar> = None;
    // One bar below shows the bytes of all files together.
    let config = HubConfig::of_cache(&Surroundings::unseen(&variable))?;
    let model = hub_model(path, config, &accepts, &mut |event| match event {
        HubModelEvent::Waiting => remark("waiting for another process that fetches this model"),
        HubModelEvent::Fetching { num_files, num_bytes, dir } => {
            remark(&format!(
                "fetching {}: {} of {} into {}",
                path.shown(),
                terminal::bytes(num_bytes),
                terminal::counted(num_files as u64, "file"),
                dir.shown()
            ));
            bar = prints.then(|| FolderBar::new(dir, num_bytes));
        }
        HubModelEvent::Fetched { name, num_bytes } => {
            remark(&format!("fetched {}, {}", Path::new(name).shown(), terminal::bytes(num_bytes)));
        }
    });
    drop(bar);
    let model = model?;
    remark(&format!("{} is at commit {}, in {}", path.shown(), model.commit, model.path.shown()));
    Ok(Some(model))
}

/// Bytes of the checkpoint that an import writes: its parameters in f32; 0 if the folder cannot be imported.
pub fn imported_bytes(from: &Path, kind: Option<AttentionKind>, sets: &[String]) -> u64 {
    let model = sieve_hf::imported_model(from, kind, sets);
    model.map_or(0, |(_, shape)| shape.parameters().total() * size_of::<f32>() as u64)
}

/// The checkpoint that a run begins with: a path is itself, `hf://OWNER/NAME` is fetched and imported into the cache,
/// once for each commit.
pub fn checkpoint(path: &Path) -> Result<PathBuf> {
    let mut known = CHECKPOINTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = known.get(path) {
        return Ok(found.clone());
    }
    let Some(model) = model(path)? else {
        return Ok(path.to_owned());
    };
    let name = path.to_string_lossy().trim_start_matches("hf://").replace('/', "--");
    let cache = HubConfig::of_cache(&Surroundings::unseen(&variable))?.dir.join("sieve/checkpoints");
    let out = cache.join(format!("{name}-{}", model.commit));
    std::fs::create_dir_all(&out).with_context(|| format!("creating {}", out.shown()))?;
    let lock = out.join("lock");
    let waiting = || terminal::remark("waiting for another process that imports this model");
    let _lock = lock_or_wait(&lock, waiting).with_context(|| format!("locking {}", lock.shown()))?;
    let checkpoint = out.join("step-0");
    if !checkpoint.join("state.json").is_file() {
        let _bar = FolderBar::new(&out, imported_bytes(&model.path, None, &[]));
        sieve_hf::import::<Flex>(&model.path, &out, None, &[], false, &FlexDevice)
            .with_context(|| format!("{} cannot be imported", path.shown()))?;
    }
    known.insert(path.to_owned(), checkpoint.clone());
    Ok(checkpoint)
}
