//! A selector for each layer: `0-3=dense/4-=bfla:group=64`, or one for all.

use std::fmt;

use super::{Method, Phase, Selector};
use crate::error::SelectError;

/// A selector for each layer of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSelectors {
    /// The parts in the order of the layers, without gaps.
    parts: Vec<Part>,
}

/// Consecutive layers that share a selector.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    first: usize,
    /// Index of the last layer; `None`: up to the model's last layer.
    last: Option<usize>,
    selector: Selector,
}

impl From<Selector> for LayerSelectors {
    fn from(selector: Selector) -> Self {
        let parts = vec![Part { first: 0, last: None, selector }];
        Self { parts }
    }
}

impl LayerSelectors {
    /// Reads `NAME:key=value,…` for all layers, or `LAYERS=NAME:…/LAYERS=NAME:…` with layers `4`, `0-3` and `4-`, both
    /// ends included.
    ///
    /// # Errors
    /// As [`Selector::parse`]; layers that are named twice, or left out.
    pub fn parse(text: &str) -> Result<Self, SelectError> {
        let pieces = pieces(text);
        if pieces.is_empty() {
            return Selector::parse(text).map(Self::from);
        }
        let mut parts: Vec<Part> = Vec::new();
        for (layers, selector) in pieces {
            let (first, last) = range(layers)?;
            // The layer that the next part must begin with; `None` after an open range, which names all later layers.
            let next = match parts.last() {
                None => Some(0),
                Some(before) => before.last.map(|last| last + 1),
            };
            match next {
                Some(next) if first == next => {}
                Some(next) if first > next => return Err(missing(next, first - 1)),
                _ => return Err(wrong(format!("{layers} names layer {first} a second time"))),
            }
            parts.push(Part { first, last, selector: Selector::parse(selector)? });
        }
        Ok(Self { parts })
    }

    /// Checks that the ranges name each layer of a model of `num_layers` layers.
    ///
    /// # Errors
    /// Layers past the model's last; layers of the model that are left out.
    pub fn for_layers(self, num_layers: usize) -> Result<Self, SelectError> {
        let Some(part) = self.parts.last() else {
            return Ok(self);
        };
        let named = part.last.unwrap_or(part.first);
        if named >= num_layers {
            let last = num_layers.saturating_sub(1);
            return Err(wrong(format!("layer {named} is beyond the model's last, {last}")));
        }
        if part.last.is_some() && named + 1 < num_layers {
            return Err(missing(named + 1, num_layers - 1));
        }
        Ok(self)
    }

    /// The selector of one layer.
    pub fn of(&self, layer: usize) -> &Selector {
        let after = self.parts.partition_point(|part| part.first <= layer);
        &self.parts[after.max(1) - 1].selector
    }

    /// The selector of each range of layers, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Selector> {
        self.parts.iter().map(|part| &part.selector)
    }

    /// The selector of all layers, if no layers are named.
    pub fn only(&self) -> Option<&Selector> {
        match &self.parts[..] {
            [part] if part.first == 0 && part.last.is_none() => Some(&part.selector),
            _ => None,
        }
    }

    /// A copy in which `change` has replaced every selector.
    #[must_use]
    pub fn map(self, change: impl Fn(Selector) -> Selector) -> Self {
        let parts = self.parts.into_iter().map(|part| Part { selector: change(part.selector), ..part });
        Self { parts: parts.collect() }
    }

    /// Names of the methods joined by `+`; `dense` only if there is no other.
    pub fn name(&self) -> String {
        let mut names: Vec<&str> = Vec::new();
        for selector in self.iter().filter(|one| one.method != Method::Dense) {
            if !names.contains(&selector.name()) {
                names.push(selector.name());
            }
        }
        if names.is_empty() { "dense".to_owned() } else { names.join("+") }
    }

    /// The shortest text that [`parse`](Self::parse) reads as these selectors: without settings at their defaults.
    pub fn label(&self) -> String {
        self.text(Selector::label)
    }

    /// Whether the output of a row depends on no later token in any layer.
    pub fn is_causal_map(&self) -> bool {
        self.iter().all(Selector::is_causal_map)
    }

    /// Whether a layer runs token by token only.
    pub fn is_token_by_token(&self) -> bool {
        self.iter().any(Selector::is_token_by_token)
    }

    /// Whether the tokens after a prompt read only some of the keys in one of the layers.
    pub fn acts_in_decode(&self) -> bool {
        self.iter().any(|one| one.phase() != Phase::Prefill)
    }

    /// The text of all parts, with `of` to write a selector.
    fn text(&self, of: impl Fn(&Selector) -> String) -> String {
        if let Some(only) = self.only() {
            return of(only);
        }
        let parts = self.parts.iter().map(|part| {
            let layers = match part.last {
                Some(last) if last == part.first => last.to_string(),
                last => format!("{}-{}", part.first, last.map_or(String::new(), |last| last.to_string())),
            };
            format!("{layers}={}", of(&part.selector))
        });
        parts.collect::<Vec<_>>().join("/")
    }
}

/// Writes the whole setting, which [`LayerSelectors::parse`] reads back.
impl fmt::Display for LayerSelectors {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text(ToString::to_string))
    }
}

fn wrong(problem: String) -> SelectError {
    let hint = "write every layer once, in order, for example 0-3=dense/4-=bfla";
    SelectError::refused(format!("selectors by layer: {problem}"), hint)
}

/// The error about layers that have no selector.
fn missing(first: usize, last: usize) -> SelectError {
    wrong(if last == first {
        format!("no selector for layer {first}")
    } else {
        format!("no selector for layers {first}-{last}")
    })
}

/// The parts `LAYERS=TEXT` between slashes, as (layers, text); none if the text does not begin with layers. A slash in
/// a file's name is no separator unless layers and an equals sign follow it.
fn pieces(text: &str) -> Vec<(&str, &str)> {
    // Where the layers that a text begins with end; `None` if it begins with something else.
    let begins = |text: &str| -> Option<usize> {
        let end = text.find('=')?;
        let is_range = |x: char| x.is_ascii_digit() || x == '-';
        let layers = text[..end].trim();
        (!layers.is_empty() && layers.chars().all(is_range)).then_some(end)
    };
    if begins(text).is_none() {
        return Vec::new();
    }
    let cuts = text.match_indices('/').map(|(at, _)| at + 1);
    let mut firsts: Vec<usize> = vec![0];
    firsts.extend(cuts.filter(|&at| begins(&text[at..]).is_some()));
    let ends = firsts.iter().skip(1).map(|&at| at - 1).chain([text.len()]);
    let parts = firsts.iter().zip(ends).map(|(&first, end)| &text[first..end]);
    parts.filter_map(|part| part.split_once('=')).collect()
}

/// Parses a range of layers, `4`, `0-3` or `4-`, into its first and last layer; `None` for an open end.
fn range(text: &str) -> Result<(usize, Option<usize>), SelectError> {
    let text = text.trim();
    let number = |digits: &str| digits.parse::<usize>().ok();
    let found = match text.split_once('-') {
        None => number(text).map(|layer| (layer, Some(layer))),
        Some((first, "")) => number(first).map(|first| (first, None)),
        Some((first, last)) => number(first)
            .zip(number(last))
            .filter(|(first, last)| first <= last)
            .map(|(first, last)| (first, Some(last))),
    };
    found.ok_or_else(|| wrong(format!("{text:?} names no layers")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> LayerSelectors {
        LayerSelectors::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn every_layer_has_the_selector_that_names_it() {
        let text = "0-1=dense/2=meanpool:tau=0.5/3-=quest:budget=64";
        let selectors = parsed(text).for_layers(6).expect("they fit");
        let names: Vec<&str> = (0..6).map(|layer| selectors.of(layer).name()).collect();
        assert_eq!(names, ["dense", "dense", "meanpool", "quest", "quest", "quest"]);
        assert_eq!((selectors.name().as_str(), selectors.only()), ("meanpool+quest", None));
        assert_eq!(selectors.label(), text);
        assert_eq!(parsed(&selectors.to_string()), selectors);
        assert!(selectors.is_token_by_token() && selectors.acts_in_decode());
        assert!(!selectors.is_causal_map());
    }

    #[test]
    fn a_single_selector_serves_all_layers() {
        for text in ["meanpool:tau=0.5", "dense"] {
            let selectors = parsed(text).for_layers(2).expect("it fits");
            assert_eq!(selectors.only(), Some(selectors.of(1)));
            assert_eq!(selectors.label(), text);
            assert_eq!(parsed(&selectors.to_string()), selectors);
            assert_eq!(parsed(&format!("0-={text}")), selectors);
        }
        assert_eq!(parsed("0-1=dense").name(), "dense");
    }
}
