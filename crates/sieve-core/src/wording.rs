//! What errors and lines have in common: a refusal with its hint, a number with its noun, the known name that a
//! misspelt one resembles, texts made safe for a terminal.

mod counted;
mod did_you_mean;
mod pickles;
mod refusal;
mod short_form;
mod shown;

pub use counted::counted;
pub use did_you_mean::did_you_mean;
pub use pickles::how_to_convert;
pub use refusal::Refusal;
pub use short_form::number_of_short_form;
pub use shown::{Shown, ShownPath, quoted, shell_word, shown_text};
