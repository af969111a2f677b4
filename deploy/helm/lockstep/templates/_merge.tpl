{{/*
"lockstep.merged": JSON of {"v": merged} for (list BASE PATCH).
Maps are merged key by key. Lists whose items have a mountPath or a name are merged by it; other lists are replaced. A
volume's or a variable's source takes the place of one of another kind.
Source of the rule: strategic merge patch, with the merge keys that the Kubernetes API names for pods.
*/}}
{{- define "lockstep.merged" -}}
{{- $base := index . 0 }}{{ $patch := index . 1 }}
{{- $key := include "lockstep.mergeKey" (list $base $patch) }}
{{- if and (kindIs "map" $base) (kindIs "map" $patch) }}
  {{- $out := deepCopy $base }}
  {{- range $name, $value := $patch }}
    {{- $old := get $base $name }}
    {{- $_ := set $out $name (ternary (include "lockstep.merged" (list $old $value) | fromJson).v $value (hasKey $base $name)) }}
  {{- end }}
  {{- dict "v" $out | toJson }}
{{- else if $key }}
  {{- $out := list }}
  {{- range $old := $base }}
    {{- $item := $old }}
    {{- range $new := $patch }}
      {{- if eq (get $new $key) (get $old $key) }}{{ $item = (include "lockstep.mergedItem" (list $old $new) | fromJson).v }}{{ end }}
    {{- end }}
    {{- $out = append $out $item }}
  {{- end }}
  {{- range $new := $patch }}
    {{- $known := false }}
    {{- range $old := $base }}{{ if eq (get $new $key) (get $old $key) }}{{ $known = true }}{{ end }}{{ end }}
    {{- if not $known }}{{ $out = append $out $new }}{{ end }}
  {{- end }}
  {{- dict "v" $out | toJson }}
{{- else }}
  {{- dict "v" $patch | toJson }}
{{- end }}
{{- end }}

{{/* The same for two items of one name. What has one key beside the name is a union, in which two kinds cannot be at once. */}}
{{- define "lockstep.mergedItem" -}}
{{- $old := omit (index . 0) "name" | keys }}{{ $new := omit (index . 1) "name" | keys }}
{{- if and (eq (len $old) 1) (eq (len $new) 1) (ne (first $old) (first $new)) (ne (first $old) "containerPort") }}
  {{- dict "v" (index . 1) | toJson }}
{{- else }}
  {{- include "lockstep.merged" . }}
{{- end }}
{{- end }}

{{/* JSON of {"v": value} without the keys of its maps that are null, at any depth: an API server reads some as 0. */}}
{{- define "lockstep.withoutNulls" -}}
{{- if kindIs "map" . }}
  {{- $out := dict }}
  {{- range $name, $value := . }}
    {{- if not (kindIs "invalid" $value) }}{{ $_ := set $out $name (include "lockstep.withoutNulls" $value | fromJson).v }}{{ end }}
  {{- end }}
  {{- dict "v" $out | toJson }}
{{- else if kindIs "slice" . }}
  {{- $out := list }}
  {{- range . }}{{ $out = append $out (include "lockstep.withoutNulls" . | fromJson).v }}{{ end }}
  {{- dict "v" $out | toJson }}
{{- else }}
  {{- dict "v" . | toJson }}
{{- end }}
{{- end }}

{{/* The key by which two lists are merged, or nothing. */}}
{{- define "lockstep.mergeKey" -}}
{{- $key := "" }}
{{- if and (kindIs "slice" (index . 0)) (kindIs "slice" (index . 1)) }}
  {{- range $candidate := list "name" "mountPath" }}
    {{- $fits := true }}
    {{- range $item := concat (index $ 0) (index $ 1) }}
      {{- if not (and (kindIs "map" $item) (hasKey $item $candidate)) }}{{ $fits = false }}{{ end }}
    {{- end }}
    {{- if $fits }}{{ $key = $candidate }}{{ end }}
  {{- end }}
{{- end }}
{{- $key }}
{{- end }}
