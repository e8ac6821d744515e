//! What can be wrong with files of weights.
use std::io::ErrorKind;
use std::path::PathBuf;

/// An error of reading or writing weights.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or folder that appears whole or not at all.
    #[error(transparent)]
    File(#[from] sieve_files::FileError),
    /// A file system operation failed.
    #[error("{action} {}: {source}{}", path.display(), match source.kind() {
        ErrorKind::PermissionDenied => "\n  hint: this user may not; see ls -l and chmod",
        _ => "",
    })]
    Io {
        /// What was tried, as a present participle.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A file is not what its checksum says.
    #[error(
        "{} is damaged: {problem}\n  hint: resume from the checkpoint before it by naming it, --resume-from {}",
        path.display(), previous.as_ref().map_or_else(|| "DIR (there is none before \
            it)".to_owned(), |p| p.display().to_string())
    )]
    Damaged {
        /// The damaged file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// The checkpoint before it, if any.
        previous: Option<PathBuf>,
    },
    /// A state file cannot be understood.
    #[error("{}: {problem}{}", path.display(), match problem.contains("hint:") {
        true => "",
        false => "\n  hint: fetch or copy the file again",
    })]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Tensors do not fit the model.
    #[error("{} does not hold this model's weights: {problem}\n  \
        hint: the checkpoint belongs to a recipe with another [model] or [attention]", path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The first difference.
        problem: String,
    },
    /// The recipe beside the weights cannot be used.
    #[error("{}: {source}", path.display())]
    BadRecipe {
        /// The recipe.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<sieve_core::RecipeError>,
    },
    /// No class of `transformers` computes the model.
    #[error("{what}\n  hint: {hint}")]
    NotExportable {
        /// The key of the recipe, and why it has no place there.
        what: &'static str,
        /// What can be exported.
        hint: &'static str,
    },
    /// A folder of `transformers` that no recipe describes.
    #[error("{} cannot be imported: {problem}\n  hint: {hint}", path.display())]
    NotImportable {
        /// The folder or file.
        path: PathBuf,
        /// Everything that is in the way.
        problem: String,
        /// What can be imported.
        hint: &'static str,
    },
    /// The folder to import into holds a run or an import.
    #[error("{} holds {found}\n  hint: name a new or empty folder with --out", path.display())]
    ImportFolderInUse {
        /// The folder.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// The folder to export to holds something else.
    #[error("{} holds {found}, which no export wrote\n  hint: name a new or empty folder", path.display())]
    FolderInUse {
        /// The folder.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// No checkpoint where one was expected.
    #[error("{} holds no checkpoint\n  \
        hint: name a folder step-N, or a run folder with checkpoint/step-N inside", path.display())]
    NotFound {
        /// Where was looked.
        path: PathBuf,
    },
}

impl CheckpointError {
    /// Adapter for `map_err`.
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
