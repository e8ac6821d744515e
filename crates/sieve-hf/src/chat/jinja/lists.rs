//! Filters of lists.

use super::fault::{Fallible, Fault};
use super::filters::no_number;
use super::python::text;
use super::render::{Given, Renderer};
use super::syntax::Operator;
use super::value::Value;
use std::cmp::Ordering;

impl Renderer<'_> {
    /// A filter that takes a list.
    pub(super) fn list_filter(&mut self, name: &str, value: Value, given: Given) -> Fallible<Value> {
        match name {
            "list" => {
                let [] = given.bind(name, [])?;
                let items = value.items(self.budget)?;
                Value::list(items, self.budget)
            }
            "first" | "last" => {
                let [] = given.bind(name, [])?;
                self.end_of(name, &value)
            }
            "join" => self.join(&value, given),
            "map" => self.map(&value, given),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, &value, given),
            "items" => {
                let [] = given.bind(name, [])?;
                self.pairs(&value)
            }
            "reverse" => {
                let [] = given.bind(name, [])?;
                self.reverse(&value)
            }
            "sort" => {
                let [reverse, case, attribute] = given.bind(name, ["reverse", "case_sensitive", "attribute"])?;
                let items = value.items(self.budget)?;
                let items = self.sorted(items, &attribute, is_true(&case), is_true(&reverse))?;
                Value::list(items, self.budget)
            }
            "dictsort" => self.dictsort(&value, given),
            "unique" => self.unique(&value, given),
            "groupby" => self.groupby(&value, given),
            "min" | "max" => self.extreme(name, &value, given),
            "sum" => self.sum_of(&value, given),
            "batch" => self.batch(&value, given),
            "slice" => self.slices(&value, given),
            "pprint" => self.one_line(&value),
            _ => Err(Fault::refused(format!("the filter {name} is not here"))),
        }
    }

    /// The items whose `attribute`, or which themselves, equal none before them; letters of either case are equal
    /// unless `case_sensitive`.
    fn unique(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [case, attribute] = given.bind("unique", ["case_sensitive", "attribute"])?;
        let (mut seen, mut kept): (Vec<Value>, _) = (Vec::new(), Vec::new());
        for item in value.items(self.budget)? {
            let key = self.key(&item, &attribute, is_true(&case))?;
            let mut is_new = true;
            for found in &seen {
                is_new &= !found.equals(&key, self.budget)?;
            }
            if is_new {
                seen.push(key);
                kept.push(item);
            }
        }
        Value::stream(kept, self.budget)
    }

    /// The least or greatest item; the first of equal ones.
    fn extreme(&mut self, name: &str, value: &Value, given: Given) -> Fallible<Value> {
        let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
        let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
        let mut best: Option<(Value, Value)> = None;
        for item in value.items(self.budget)? {
            let key = self.key(&item, &attribute, is_true(&case))?;
            let is_better = match &best {
                Some((found, _)) => key.order(found, self.budget)? == Some(wanted),
                None => true,
            };
            if is_better {
                best = Some((key, item));
            }
        }
        Ok(best.map_or_else(|| Value::undefined(format!("an empty list has no {name}")), |(_, item)| item))
    }

    /// `start`, or 0, plus the items or their `attribute`; texts are refused.
    fn sum_of(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [attribute, start] = given.bind("sum", ["attribute", "start"])?;
        let mut sum = start.unwrap_or(Value::Int(0));
        for item in value.items(self.budget)? {
            let item = self.by_attribute(&item, &attribute)?;
            if matches!(item, Value::Text(_)) {
                return Err(no_number());
            }
            sum = self.binary(Operator::Add, &sum, &item)?;
        }
        Ok(sum)
    }

    /// The `first` or the `last` item, undefined if there is none. A generator loses its first item, and has no last
    /// one.
    fn end_of(&mut self, name: &str, value: &Value) -> Fallible<Value> {
        let found = match (value, name) {
            (Value::Stream(stream), "first") => stream.items.borrow_mut().pop_front(),
            (Value::Stream(_), _) => return Err(Fault::refused("last takes a list, not a generator")),
            (Value::List(items) | Value::Tuple(items), "first") => items.items.first().cloned(),
            (Value::List(items) | Value::Tuple(items), _) => items.items.last().cloned(),
            (value, name) => {
                let items = value.items(self.budget)?;
                if name == "first" { items.into_iter().next() } else { items.into_iter().next_back() }
            }
        };
        Ok(found.unwrap_or_else(|| Value::undefined(format!("an empty list has no {name} item"))))
    }

    /// The pairs of a dictionary.
    fn pairs(&self, value: &Value) -> Fallible<Value> {
        match value {
            Value::Undefined(_) => Value::stream(Vec::new(), self.budget),
            Value::Dict(dict) => {
                let pairs = dict.pairs.iter();
                let pairs = pairs.map(|(k, v)| Value::tuple(vec![k.clone(), v.clone()], self.budget));
                Value::stream(pairs.collect::<Fallible<_>>()?, self.budget)
            }
            other => Err(Fault::refused(format!("items takes a dictionary, not a {}", other.kind()))),
        }
    }

    /// The texts of the items, or of their `attribute`, with the text `d` between them.
    fn join(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [separator, attribute] = given.bind("join", ["d", "attribute"])?;
        let separator = separator.map_or(Ok(String::new()), |separator| text(&separator, self.budget))?;
        let mut out = String::new();
        for (n, item) in value.items(self.budget)?.iter().enumerate() {
            if n > 0 {
                self.budget.text(separator.len())?;
                out += &separator;
            }
            let item = self.by_attribute(item, &attribute)?;
            out += &text(&item, self.budget)?;
        }
        Ok(Value::made(out))
    }

    /// The `attribute` of each item, or `default` where it is undefined; else each item behind the filter that the
    /// first argument names, which gets the other arguments.
    fn map(&mut self, value: &Value, mut given: Given) -> Fallible<Value> {
        let items = value.items(self.budget)?;
        let mut made = Vec::with_capacity(items.len());
        if given.args.is_empty() && given.named.iter().any(|(name, _)| name == "attribute") {
            let [attribute, default] = given.bind("map", ["attribute", "default"])?;
            for item in items {
                let found = self.by_attribute(&item, &attribute)?;
                let default = default.clone().filter(|_| found.is_undefined());
                made.push(default.unwrap_or(found));
            }
        } else {
            if given.args.is_empty() {
                return Err(Fault::refused("map is given no filter"));
            }
            let name = text(&given.args.remove(0), self.budget)?;
            for item in items {
                let given = Given { args: given.args.clone(), named: given.named.clone() };
                made.push(self.deeper(|renderer| renderer.filter(&name, item, given))?);
            }
        }
        Value::stream(made, self.budget)
    }

    /// The items that pass a test, which the first argument names, or that are true without one; for `reject…` the
    /// others. For `…attr` the first argument is the attribute that is tested, and the test comes second.
    fn select(&mut self, name: &str, value: &Value, mut given: Given) -> Fallible<Value> {
        let mut attribute = None;
        if name.ends_with("attr") {
            if given.args.is_empty() {
                return Err(Fault::refused(format!("{name} is given no attribute")));
            }
            attribute = Some(given.args.remove(0));
        }
        let test = if given.args.is_empty() { None } else { Some(text(&given.args.remove(0), self.budget)?) };
        let mut kept = Vec::new();
        for item in value.items(self.budget)? {
            let found = self.by_attribute(&item, &attribute)?;
            let holds = match &test {
                Some(test) => {
                    let given = Given { args: given.args.clone(), named: given.named.clone() };
                    self.test(test, &found, given)?
                }
                None => found.is_true(),
            };
            if holds != name.starts_with("reject") {
                kept.push(item);
            }
        }
        Value::stream(kept, self.budget)
    }

    /// A text or the items from the last to the first: those of a generator as a list, all others as a generator.
    fn reverse(&mut self, value: &Value) -> Fallible<Value> {
        if let Value::Text(text) = value {
            self.budget.text(text.text.len())?;
            return Ok(Value::made(text.text.chars().rev().collect()));
        }
        let is_list = !matches!(value, Value::Stream(_) | Value::Undefined(_));
        let mut items = value.items(self.budget)?;
        items.reverse();
        if is_list { Value::stream(items, self.budget) } else { Value::list(items, self.budget) }
    }

    /// The pairs of a dictionary, sorted by `key`, or by `value` where `by` says so.
    fn dictsort(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [case, by, reverse] = given.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
        let Value::Dict(dict) = value else {
            return Err(Fault::refused(format!("dictsort takes a dictionary, not a {}", value.kind())));
        };
        let place = match by.as_ref().map_or(Some("key"), Value::as_str) {
            Some("key") => 0,
            Some("value") => 1,
            _ => return Err(Fault::refused("dictsort sorts by key or value")),
        };
        let pairs = dict.pairs.iter().map(|(k, v)| Value::tuple(vec![k.clone(), v.clone()], self.budget));
        let pairs = pairs.collect::<Fallible<Vec<_>>>()?;
        let sorted = self.sorted(pairs, &Some(Value::Int(place)), is_true(&case), is_true(&reverse))?;
        Value::list(sorted, self.budget)
    }

    /// Pairs of an attribute's value and the list of the items that have it, sorted by the value. Unless
    /// `case_sensitive`, letters of either case are one value, the first item's.
    fn groupby(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [attribute, default, case] = given.bind("groupby", ["attribute", "default", "case_sensitive"])?;
        let mut keyed = Vec::new();
        for item in value.items(self.budget)? {
            let found = self.by_attribute(&item, &attribute)?;
            let found = if found.is_undefined() { default.clone().unwrap_or(found) } else { found };
            let key = if is_true(&case) { found.clone() } else { self.without_case(&found)? };
            keyed.push(Value::tuple(vec![key, found, item], self.budget)?);
        }
        let sorted = self.sorted(keyed, &Some(Value::Int(0)), true, false)?;
        let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
        for entry in sorted {
            let Value::Tuple(entry) = entry else {
                continue;
            };
            let [key, found, item] = [0, 1, 2].map(|at: usize| entry.items[at].clone());
            match groups.last_mut() {
                Some((last, _, items)) if last.equals(&key, self.budget)? => items.push(item),
                _ => groups.push((key, found, vec![item])),
            }
        }
        let group = |(_, found, items)| Value::tuple(vec![found, Value::list(items, self.budget)?], self.budget);
        Value::list(groups.into_iter().map(group).collect::<Fallible<_>>()?, self.budget)
    }

    /// The items in rows of `linecount`; the last is filled up with `fill_with`, if that is given.
    fn batch(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [size, fill] = given.bind("batch", ["linecount", "fill_with"])?;
        let size = size.and_then(|size| size.as_int()).filter(|size| *size > 0).ok_or_else(no_number)?;
        let size = usize::try_from(size).unwrap_or(usize::MAX);
        let items = value.items(self.budget)?;
        let mut rows = Vec::new();
        for row in items.chunks(size) {
            let mut row = row.to_vec();
            if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None)) {
                self.budget.list(size - row.len())?;
                row.resize(size, fill.clone());
            }
            rows.push(Value::list(row, self.budget)?);
        }
        Value::stream(rows, self.budget)
    }

    /// The items in `slices` rows, of which the first ones are longer by one where the items do not divide; each other
    /// row ends with `fill_with`, if that is given.
    fn slices(&mut self, value: &Value, given: Given) -> Fallible<Value> {
        let [count, fill] = given.bind("slice", ["slices", "fill_with"])?;
        let count = count.and_then(|count| count.as_int()).filter(|count| *count > 0).ok_or_else(no_number)?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let items = value.items(self.budget)?;
        self.budget.list(count)?;
        let (each, more) = (items.len() / count, items.len() % count);
        let mut rows = Vec::with_capacity(count);
        let mut items = items.into_iter();
        for row in 0..count {
            let mut found = items.by_ref().take(each + usize::from(row < more)).collect::<Vec<_>>();
            if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None))
                && row >= more
            {
                found.push(fill.clone());
            }
            rows.push(Value::list(found, self.budget)?);
        }
        Value::stream(rows, self.budget)
    }

    /// `item.a.b` for the attribute `"a.b"`; the item itself without an attribute.
    fn by_attribute(&mut self, item: &Value, attribute: &Option<Value>) -> Fallible<Value> {
        let path = match attribute {
            None | Some(Value::None) => return Ok(item.clone()),
            Some(Value::Text(path)) => path.text.clone(),
            Some(index) => return self.item(item, index),
        };
        let mut found = item.clone();
        for part in path.split('.') {
            let key = match part.parse::<i128>() {
                Ok(index) if part.bytes().all(|byte| byte.is_ascii_digit()) => Value::Int(index),
                _ => Value::text(part, self.budget)?,
            };
            found = self.item(&found, &key)?;
        }
        Ok(found)
    }

    fn without_case(&self, value: &Value) -> Fallible<Value> {
        match value {
            Value::Text(found) => Value::text(&found.text.to_lowercase(), self.budget),
            other => Ok(other.clone()),
        }
    }

    /// What an item is compared by.
    fn key(&mut self, item: &Value, attribute: &Option<Value>, has_case: bool) -> Fallible<Value> {
        let found = self.by_attribute(item, attribute)?;
        if has_case { Ok(found) } else { self.without_case(&found) }
    }

    /// Items in order; equal ones keep theirs.
    fn sorted(
        &mut self,
        items: Vec<Value>,
        attribute: &Option<Value>,
        has_case: bool,
        is_reversed: bool,
    ) -> Fallible<Vec<Value>> {
        let paths = match attribute {
            Some(Value::Text(paths)) => {
                let paths = paths.text.split(',').map(|path| Value::text(path, self.budget).map(Some));
                paths.collect::<Fallible<Vec<_>>>()?
            }
            other => vec![other.clone()],
        };
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            let keys = paths.iter().map(|path| self.key(&item, path, has_case)).collect::<Fallible<Vec<_>>>()?;
            keyed.push((Value::list(keys, self.budget)?, item));
        }
        let sorted = self.merged(keyed, is_reversed)?;
        Ok(sorted.into_iter().map(|(_, item)| item).collect())
    }

    /// Merge sort, since a comparison may fail.
    fn merged(&self, mut items: Vec<(Value, Value)>, is_reversed: bool) -> Fallible<Vec<(Value, Value)>> {
        if items.len() < 2 {
            return Ok(items);
        }
        let behind = items.split_off(items.len() / 2);
        let (left, right) = (self.merged(items, is_reversed)?, self.merged(behind, is_reversed)?);
        let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
        let mut merged = Vec::with_capacity(left.len() + right.len());
        while let (Some((a, _)), Some((b, _))) = (left.peek(), right.peek()) {
            let later = if is_reversed { Ordering::Less } else { Ordering::Greater };
            let takes_right = a.order(b, self.budget)? == Some(later);
            merged.extend(if takes_right { right.next() } else { left.next() });
        }
        merged.extend(left.chain(right));
        Ok(merged)
    }
}

fn is_true(value: &Option<Value>) -> bool {
    value.as_ref().is_some_and(Value::is_true)
}
