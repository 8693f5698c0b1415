//! Reads those fields of a pod that [`super::mutate`] and [`super::warnings`] use, with a limit on their number and size. All other fields are
//! skipped without memory of their own: a body from an unknown sender would otherwise cost a hundred times its size.

use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::mutate::{ANNOTATIONS, SHARED};
use super::warnings::PROFILES;

/// Limit of the values that are kept. A container has about ten.
const MOST_VALUES: usize = 8192;
/// Limit of the kept text in bytes. The API server limits all annotations together to 256 KiB.
const MOST_TEXT: usize = 1 << 20;

/// Returns the pod's RuntimeClass; `None` also for JSON that has not the form of a pod.
pub(super) fn runtime_class(pod: &RawValue) -> Option<String> {
    #[derive(Deserialize)]
    struct Pod {
        spec: Spec,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Spec {
        runtime_class_name: String,
    }
    serde_json::from_str::<Pod>(pod.get()).ok().map(|pod| pod.spec.runtime_class_name)
}

/// Returns the pod with the fields that are used alone; a list keeps the number of its elements.
pub(super) fn read(pod: &RawValue) -> Result<Value, serde_json::Error> {
    let mut left = Left { values: MOST_VALUES, text: MOST_TEXT };
    let mut json = serde_json::Deserializer::from_str(pod.get());
    Kept { part: Part::Pod, left: &mut left }.deserialize(&mut json)
}

/// Part of a pod, which decides about the fields below it.
#[derive(Clone, Copy)]
enum Part {
    Pod,
    Metadata,
    Annotations,
    Spec,
    Containers,
    Container,
    Volumes,
    Volume,
    SecurityContext,
    Profile,
    /// Everything below is kept.
    Whole,
}

impl Part {
    /// Returns the part that this field is; `None`: it is not used.
    fn field(self, name: &str) -> Option<Part> {
        match (self, name) {
            (Part::Pod, "metadata") => Some(Part::Metadata),
            (Part::Pod, "spec") => Some(Part::Spec),
            (Part::Metadata, "annotations") => Some(Part::Annotations),
            (Part::Annotations, name) if ANNOTATIONS.contains(&name) => Some(Part::Whole),
            (Part::Spec, "containers" | "initContainers") => Some(Part::Containers),
            (Part::Spec, "resources" | "runtimeClassName") => Some(Part::Whole),
            (Part::Spec, name) if SHARED.iter().any(|(key, _)| *key == name) => Some(Part::Whole),
            (Part::Spec, "volumes") => Some(Part::Volumes),
            (Part::Spec | Part::Container, "securityContext") => Some(Part::SecurityContext),
            (Part::SecurityContext, name) if PROFILES.iter().any(|(key, _)| *key == name) => {
                Some(Part::Profile)
            }
            (Part::Container, "name" | "resources" | "restartPolicy")
            | (Part::Volume, "hostPath")
            | (Part::Profile, "type")
            | (Part::Whole, _) => Some(Part::Whole),
            _ => None,
        }
    }

    /// Returns the part that an element of a list is; `None`: a pod has no list here.
    fn element(self) -> Option<Part> {
        match self {
            Part::Containers => Some(Part::Container),
            Part::Volumes => Some(Part::Volume),
            Part::Whole => Some(Part::Whole),
            _ => None,
        }
    }
}

/// Values and bytes of text that may still be kept.
struct Left {
    values: usize,
    text: usize,
}

impl Left {
    fn take<E: Error>(&mut self, values: usize, text: usize) -> Result<(), E> {
        let values = self.values.checked_sub(values).ok_or_else(|| {
            E::custom(format!(
                "remove containers or volumes: they have more than {MOST_VALUES} names, requests, limits and other values"
            ))
        })?;
        let text = self.text.checked_sub(text).ok_or_else(|| {
            E::custom(format!(
                "shorten names, resources and annotations: they have more than {MOST_TEXT} bytes"
            ))
        })?;
        *self = Left { values, text };
        Ok(())
    }
}

/// Reads one value of a part.
struct Kept<'l> {
    part: Part,
    left: &'l mut Left,
}

impl<'de> DeserializeSeed<'de> for Kept<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Kept<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a part of a pod")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.left.take(1, 0).map(|()| Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.left.take(1, 0).map(|()| value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.left.take(1, 0).map(|()| value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.left.take(1, 0).map(|()| value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.left.take(1, 0).map(|()| value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.left.take(1, value.len()).map(|()| value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        self.left.take(1, 0)?;
        let mut kept = Vec::new();
        match self.part.element() {
            Some(part) => {
                while let Some(element) = list.next_element_seed(Kept { part, left: &mut *self.left })? {
                    kept.push(element);
                }
            }
            None => while list.next_element::<IgnoredAny>()?.is_some() {},
        }
        Ok(Value::Array(kept))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        self.left.take(1, 0)?;
        let mut kept = Map::new();
        while let Some(name) = object.next_key::<String>()? {
            match self.part.field(&name) {
                Some(part) => {
                    self.left.take(0, name.len())?;
                    let value = object.next_value_seed(Kept { part, left: &mut *self.left })?;
                    kept.insert(name, value);
                }
                None => drop(object.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Value::Object(kept))
    }
}

#[cfg(test)]
mod tests;
