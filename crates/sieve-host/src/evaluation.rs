//! What commands that measure a model share: their result as text and JSON, what they have when Ctrl-C ends them, and
//! the windows of a text.
pub mod output;
pub mod so_far;
pub mod text;
