//! Turns EC2's refusals into provider errors: class, cause, remedy. Pure.
//!
//! Codes: EC2 API reference, "Error codes", and those that karpenter treats as lack of capacity. The HTTP status alone
//! does not determine the class: `InsufficientInstanceCapacity` is a 500, a throttle a 503, an expired token a 400.

use peerpod_provider_api::Error;

/// Maximum length of EC2's message in an error. EC2's authorization failures contain kilobytes of ciphertext.
const MAX_MESSAGE: usize = 400;

/// Failed call: the error to return, and EC2's answer.
#[derive(Debug)]
pub(crate) struct Failure {
    pub error: Error,
    /// EC2's code and message; empty if EC2 did not answer.
    code: String,
    message: String,
}

pub(crate) enum Why {
    /// EC2 answered with an error and this HTTP status.
    Said {
        code: String,
        message: String,
        status: u16,
    },
    /// The request was sent, but not answered; EC2 may have executed it.
    NoAnswer(String),
    /// There are no credentials for the signature.
    NoCredentials(String),
    Unsent(String),
}

/// Class of an error code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Meaning {
    Throttled,
    Capacity,
    Quota,
    Auth,
    Invalid,
    NotFound,
    KeyReused,
    Transient,
}

impl Failure {
    /// Returns the failure of this call of an action, like `CreateFleet`, for an attempt, like `create of web-0`.
    pub(crate) fn new(action: &str, what: &str, why: Why) -> Failure {
        let (mut code, mut message) = (String::new(), String::new());
        let error = match why {
            Why::Said { code: said, message: words, status } => {
                let meaning = meaning(&said, status);
                let text = format!(
                    "EC2 refused {action}: {said}: {}; {}",
                    clip(&words),
                    remedy(&said, meaning, action)
                );
                (code, message) = (said, words);
                by_meaning(meaning, what, text)
            }
            Why::NoAnswer(why) => Error::transient(format!(
                "no answer from EC2 to {action}: {}; its effect is unknown, so the same call is repeated; check the route \
                 from the node to the EC2 endpoint",
                clip(&why)
            )),
            Why::NoCredentials(why) => Error::Auth {
                text: format!(
                    "{action} could not be signed: {}; give access-key-id and secret-key, a profile, or let the node or its \
                     service account have a role (IRSA, pod identity, instance profile)",
                    clip(&why)
                ),
            },
            Why::Unsent(why) => Error::invalid(format!(
                "{action} could not be built: {}; correct the settings below provider.aws",
                clip(&why)
            )),
        };
        Failure { error: error.during(what), code, message }
    }

    /// Returns EC2's error code; empty without one.
    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    /// Returns the ids that EC2's message (of a `…NotFound`) names.
    pub(crate) fn ids(&self, prefix: &str) -> Vec<String> {
        let words = self.message.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        words
            .filter(|word| word.starts_with(prefix) && word.len() > prefix.len())
            .map(str::to_owned)
            .collect()
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { error, code: String::new(), message: String::new() }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        failure.error
    }
}

impl AsRef<Error> for Failure {
    fn as_ref(&self) -> &Error {
        &self.error
    }
}

/// Returns the class of an error code of EC2, or of STS, which issues the credentials.
pub(crate) fn meaning(code: &str, status: u16) -> Meaning {
    match code {
        "RequestLimitExceeded"
        | "Throttling"
        | "ThrottlingException"
        | "ThrottledException"
        | "RequestThrottled"
        | "RequestThrottledException"
        | "EC2ThrottledException"
        | "TooManyRequestsException"
        | "SlowDown"
        | "BandwidthLimitExceeded" => Meaning::Throttled,
        "InsufficientInstanceCapacity"
        | "InsufficientHostCapacity"
        | "InsufficientReservedInstanceCapacity"
        | "InsufficientCapacity"
        | "InsufficientFreeAddressesInSubnet"
        | "InsufficientAddressCapacity"
        | "UnfulfillableCapacity"
        | "ReservationCapacityExceeded"
        | "SpotMaxPriceTooLow"
        | "Unsupported"
        | "MaxFleetCountExceeded" => Meaning::Capacity,
        "PendingVerification" => Meaning::Quota,
        "UnauthorizedOperation"
        | "AccessDenied"
        | "AccessDeniedException"
        | "InvalidClientTokenId"
        | "UnrecognizedClientException"
        | "ExpiredToken"
        | "ExpiredTokenException"
        | "RequestExpired"
        | "SignatureDoesNotMatch"
        | "IncompleteSignature"
        | "MissingAuthenticationToken"
        | "InvalidIdentityToken"
        | "OptInRequired"
        | "Blocked" => Meaning::Auth,
        "InvalidInstanceID.NotFound" | "InvalidVolume.NotFound" | "InvalidAttachment.NotFound" => {
            Meaning::NotFound
        }
        "IdempotentParameterMismatch" => Meaning::KeyReused,
        "InternalError" | "InternalFailure" | "ServiceUnavailable" | "Unavailable" => Meaning::Transient,
        _ if code.starts_with("AuthFailure") => Meaning::Auth,
        _ if code.ends_with("LimitExceeded") || code.ends_with("CountExceeded") => Meaning::Quota,
        _ if status == 429 => Meaning::Throttled,
        _ if status >= 500 => Meaning::Transient,
        _ => Meaning::Invalid,
    }
}

pub(crate) fn remedy(code: &str, meaning: Meaning, action: &str) -> String {
    let text = match code {
        "UnauthorizedOperation" | "AccessDenied" | "AccessDeniedException" => {
            return format!(
                "allow ec2:{action} to this identity (providers/aws/iam-policy.json is the whole list)"
            );
        }
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted" => {
            "create the spot service-linked role once: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com"
        }
        "ExpiredToken" | "ExpiredTokenException" | "RequestExpired" => {
            "renew the credentials, and check the node's clock"
        }
        "SignatureDoesNotMatch" => "correct the secret key, and check the node's clock",
        "InvalidClientTokenId" | "UnrecognizedClientException" => {
            "use an access key that exists and is active"
        }
        "AuthFailure" => {
            "check the access key, its secret, and that the account may use this region and image"
        }
        "OptInRequired" => "subscribe the account to EC2 (or to the image, if it is from the marketplace)",
        "VcpuLimitExceeded" | "InstanceLimitExceeded" | "MaxSpotInstanceCountExceeded" => {
            "ask for a higher quota of this instance family (Service Quotas, Amazon EC2), or allow other instance-types"
        }
        "AttachmentLimitExceeded" => "use a larger instance type, or fewer volumes in the pod",
        "InsufficientFreeAddressesInSubnet" => "give larger or more subnet-ids",
        "Unsupported" => "allow instance-types that exist in these zones, or give subnet-ids in others",
        "InvalidAMIID.NotFound" | "InvalidAMIID.Malformed" | "InvalidAMIID.Unavailable" => {
            "set image-id to an AMI of this region that is shared with the account"
        }
        "InvalidSubnetID.NotFound" | "InvalidSubnet.NotFound" => {
            "set subnet-ids to subnets of this region and account"
        }
        "InvalidGroup.NotFound" | "InvalidSecurityGroupID.NotFound" | "InvalidGroupId.Malformed" => {
            "set security-group-ids to groups in the VPC of subnet-ids"
        }
        "InvalidKeyPair.NotFound" => "set key-name to a key pair of this region, or remove it",
        "InvalidIamInstanceProfileArn.Malformed" | "InvalidIamInstanceProfileName.NotFound" => {
            "set instance-profile to one that exists"
        }
        "InvalidUserData.Malformed" => {
            "user-data must have at most 16 KiB; this is a bug in Peerpod, report it"
        }
        "InvalidInstanceType" => "correct instance-type and instance-types",
        "InvalidVolume.ZoneMismatch" => "give a subnet in the volume's zone",
        "VolumeInUse" => "end the pod or instance that uses the volume; it attaches to one VM only",
        "InvalidLaunchTemplateName.NotFoundException" | "InvalidLaunchTemplateId.NotFound" => {
            "correct launch-template, or remove it to have one made"
        }
        _ => usual_remedy(meaning),
    };
    text.to_owned()
}

/// Returns the remedy for a code that has none of its own.
fn usual_remedy(meaning: Meaning) -> &'static str {
    match meaning {
        Meaning::Throttled => "it is tried again more slowly; others in the account use the same limit",
        Meaning::Capacity => "allow more instance-types or give subnet-ids in more zones",
        Meaning::Quota => "raise the account's limit (Service Quotas, Amazon EC2)",
        Meaning::Auth => "check the credentials and their permissions",
        Meaning::Transient => "it is tried again; if it stays, look at the AWS health dashboard",
        Meaning::KeyReused => "this is a bug in Peerpod, report it",
        Meaning::NotFound | Meaning::Invalid => {
            "correct the settings below provider.aws, or the pod's annotations"
        }
    }
}

/// Builds the error of a class. Only [`Error::Capacity`] uses `offering`.
pub(crate) fn by_meaning(meaning: Meaning, offering: &str, text: String) -> Error {
    match meaning {
        Meaning::Throttled => Error::Throttled { after: None, text },
        Meaning::Capacity => Error::capacity(offering, text),
        Meaning::Quota => Error::Quota { text },
        Meaning::Auth => Error::Auth { text },
        Meaning::Invalid => Error::Invalid { text },
        Meaning::NotFound => Error::NotFound { text },
        Meaning::KeyReused => Error::KeyReused { text },
        Meaning::Transient => Error::Transient { text },
    }
}

/// Formats a refusal inside a successful answer, like the errors of a fleet, with its remedy.
pub(crate) fn said(code: &str, message: &str, action: &str) -> String {
    format!("{code}: {}; {}", clip(message), remedy(code, meaning(code, 400), action))
}

/// Reduces a message to one line of limited length, without ciphertext and control characters.
fn clip(message: &str) -> String {
    let plain = message.split("Encoded authorization failure message").next().unwrap_or_default();
    let clean: String =
        plain.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_MESSAGE).collect();
    clean.trim().trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(code: &str, status: u16, message: &str) -> Error {
        let why = Why::Said { code: code.to_owned(), message: message.to_owned(), status };
        Failure::new("CreateFleet", "create of web-0", why).error
    }

    #[test]
    fn a_code_gives_the_class_and_the_text_gives_cause_and_remedy() {
        let cases = [
            ("RequestLimitExceeded", 503, "throttled", "more slowly"),
            ("InsufficientInstanceCapacity", 500, "capacity", "subnet-ids in more zones"),
            ("Unsupported", 400, "capacity", "exist in these zones"),
            ("InsufficientFreeAddressesInSubnet", 400, "capacity", "larger or more subnet-ids"),
            ("VcpuLimitExceeded", 400, "quota", "higher quota"),
            ("MaxSpotInstanceCountExceeded", 400, "quota", "higher quota"),
            ("VolumeLimitExceeded", 400, "quota", "Service Quotas"),
            ("UnauthorizedOperation", 403, "auth", "allow ec2:CreateFleet"),
            ("ExpiredToken", 400, "auth", "renew the credentials"),
            ("AuthFailure", 401, "auth", "check the access key"),
            ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403, "auth", "create-service-linked-role"),
            ("InvalidParameterValue", 400, "invalid", "provider.aws"),
            ("InvalidAMIID.NotFound", 400, "invalid", "set image-id"),
            ("InvalidInstanceID.NotFound", 400, "not_found", ""),
            ("IdempotentParameterMismatch", 400, "key_reused", "bug in Peerpod"),
            ("InternalError", 500, "transient", "tried again"),
            ("SomethingNew", 502, "transient", "tried again"),
            ("SomethingNew", 400, "invalid", "correct the settings"),
            ("SomethingNew", 429, "throttled", "more slowly"),
        ];
        for (code, status, class, remedy) in cases {
            let error = said(code, status, "The cause.");
            assert_eq!(error.class(), class, "{code}");
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("create of web-0: EC2 refused CreateFleet: {code}: The cause; ")),
                "{text}"
            );
            assert!(text.contains(remedy), "{remedy} in {text}");
        }
    }

    #[test]
    fn ciphertext_and_endless_messages_stay_out() {
        let message = format!("You may not. Encoded authorization failure message: {}", "x".repeat(3000));
        let text = said("UnauthorizedOperation", 403, &message).to_string();
        assert!(text.contains("You may not; allow") && text.len() < 300, "{text}");
        assert!(said("Odd", 400, &"y\n".repeat(5000)).to_string().len() < 700);
    }

    #[test]
    fn the_missing_ids_are_found_in_the_message() {
        let message = "The instance IDs 'i-0123, i-4567' do not exist".to_owned();
        let why = Why::Said { code: "InvalidInstanceID.NotFound".to_owned(), message, status: 400 };
        assert_eq!(Failure::new("TerminateInstances", "", why).ids("i-"), ["i-0123", "i-4567"]);
    }

    #[test]
    fn a_call_without_an_answer_may_have_had_its_effect() {
        let refusal = |why| Failure::new("CreateFleet", "create of a", why).error;
        assert_eq!(refusal(Why::NoAnswer("reset".into())).class(), "transient");
        let none = refusal(Why::NoCredentials("no providers".into()));
        assert!(none.class() == "auth" && none.to_string().contains("IRSA"), "{none}");
        assert_eq!(refusal(Why::Unsent("bad".into())).class(), "invalid");
    }
}
