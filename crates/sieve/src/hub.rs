//! Models of the Hugging Face hub, where a command takes the folder of a model.
use crate::environment::variable;
use crate::terminal;
use anyhow::Result;
use sieve_core::ShownPath;
use sieve_data::{HubConfig, HubModel, HubModelEvent, hub_model, is_hub_model};
use std::path::{Path, PathBuf};

/// The folder of the model that a flag names: a path is itself, and `hf://OWNER/NAME` is fetched into the cache.
pub(crate) fn folder(path: &Path) -> Result<PathBuf> {
    Ok(model(path)?.map_or_else(|| path.to_owned(), |model| model.path))
}

/// The model of the hub that `path` names, fetched unless the cache has it; `None` for a path of this disk.
pub(crate) fn model(path: &Path) -> Result<Option<HubModel>> {
    if !is_hub_model(path) {
        return Ok(None);
    }
    let model = hub_model(path, HubConfig::of_cache(&variable)?, &mut |event| match event {
        HubModelEvent::Waiting => terminal::remark("waiting for another process that fetches this model"),
        HubModelEvent::Fetching { num_files, num_bytes, dir } => {
            terminal::remark(&format!(
                "fetching {}: {} of {} into {}",
                path.shown(),
                terminal::bytes(num_bytes),
                terminal::counted(num_files as u64, "file"),
                dir.shown()
            ));
        }
        HubModelEvent::Fetched { name, num_bytes } => {
            let size = terminal::bytes(num_bytes);
            terminal::remark(&format!("fetched {}, {size}", Path::new(name).shown()));
        }
    })?;
    terminal::remark(&format!("{} is at commit {}, in {}", path.shown(), model.commit, model.path.shown()));
    Ok(Some(model))
}
