//! JSON files as an export writes them.

use serde_json::Value;

/// Text of a JSON file: indented by two spaces, keys in the given order, with a line end at the end.
pub(super) fn to_text(value: &Value) -> String {
    let mut text = serde_json::to_string_pretty(value).expect("plain data serialises");
    text.push('\n');
    text
}
