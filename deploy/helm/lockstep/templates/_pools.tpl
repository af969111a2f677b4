{{/* The name of the InferencePool that a cell's tokenizers are members of; empty if there is none: (list ROOT CELL). */}}
{{- define "lockstep.pool" -}}
{{- $cell := index . 1 }}
{{- range $pool := (index . 0).Values.inferencePools }}
{{- if has $cell.name $pool.cells }}{{ $pool.name }}{{ end }}
{{- end }}
{{- end }}

{{/* Labels of the pods of an InferencePool; the second says to an endpoint picker how it reads their metrics: NAME. */}}
{{- define "lockstep.poolLabels" -}}
lockstep-pool: {{ . | quote }}
llm-d.ai/engine-type: lockstep
{{- end }}

{{/* Fails where pools do not fit the cells; prints nothing: (list ROOT CELLS). */}}
{{- define "lockstep.checkPools" -}}
{{- $root := index . 0 }}
{{- $models := dict }}{{ $schemes := dict }}
{{- range $cell := index . 1 }}
  {{- $_ := set $models $cell.name (default (base $cell.modelDir) $cell.model.name) }}
  {{- $_ := set $schemes $cell.name (ternary "none" "TLS" $cell.tls.insecure) }}
{{- end }}
{{- $names := list }}{{ $members := list }}
{{- range $pool := $root.Values.inferencePools }}
  {{- $at := printf "inferencePools[%s]" $pool.name }}
  {{- if has $pool.name $names }}{{ fail (printf "inferencePools: the name %q is used twice" $pool.name) }}{{ end }}
  {{- $names = append $names $pool.name }}
  {{- $served := list }}{{ $spoken := list }}
  {{- range $cell := $pool.cells }}
    {{- if not (hasKey $models $cell) }}{{ fail (printf "%s.cells: there is no cell %q" $at $cell) }}{{ end }}
    {{- if has $cell $members }}{{ fail (printf "%s.cells: %q is in another pool too" $at $cell) }}{{ end }}
    {{- $members = append $members $cell }}
    {{- $served = append $served (get $models $cell) | uniq }}
    {{- $spoken = append $spoken (get $schemes $cell) | uniq }}
  {{- end }}
  {{- if gt (len $served) 1 }}
    {{- fail (printf "%s.cells: they serve different models: %s" $at (join ", " $served)) }}
  {{- end }}
  {{- if gt (len $spoken) 1 }}
    {{- fail (printf "%s.cells: some have TLS and some have not" $at) }}
  {{- end }}
{{- end }}
{{- $policy := $root.Values.networkPolicy }}
{{- if and $names $policy.enabled (not $policy.endpointPickers) }}
  {{- fail "networkPolicy.endpointPickers: is required with inferencePools, since the pickers read metrics" }}
{{- end }}
{{- end }}
