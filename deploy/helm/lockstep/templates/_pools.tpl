{{/* JSON of the InferencePools that a cell's tokenizers are members of, the name of each by its protocol: (list ROOT CELL). */}}
{{- define "lockstep.pools" -}}
{{- $cell := index . 1 }}{{ $pools := dict }}
{{- range $pool := (index . 0).Values.inferencePools }}
{{- if has $cell.name $pool.cells }}{{ $_ := set $pools (include "lockstep.protocol" $pool) $pool.name }}{{ end }}
{{- end }}
{{- toJson $pools }}
{{- end }}

{{- define "lockstep.protocol" -}}
{{- default "grpc" .protocol }}
{{- end }}

{{/* The label that says which pool of a protocol a pod is a member of: PROTOCOL. */}}
{{- define "lockstep.poolLabel" -}}
{{- ternary "lockstep-http-pool" "lockstep-pool" (eq . "http") }}
{{- end }}

{{/* Labels of the pods of InferencePools; the last says to an endpoint picker how it reads their metrics: POOLS of a cell. */}}
{{- define "lockstep.poolLabels" -}}
{{- range $protocol, $name := . }}
{{ include "lockstep.poolLabel" $protocol }}: {{ $name | quote }}
{{- end }}
llm-d.ai/engine-type: lockstep
{{- end }}

{{/* Fails where pools do not fit the cells; prints nothing: (list ROOT CELLS). */}}
{{- define "lockstep.checkPools" -}}
{{- $root := index . 0 }}
{{- $models := dict "grpc" (dict) "http" (dict) }}{{ $schemes := dict }}
{{- range $cell := index . 1 }}
  {{- $model := include "lockstep.modelName" $cell }}
  {{- $_ := set $models.grpc $cell.name $model }}
  {{- if $cell.tokenizer.http.enabled }}
    {{- $_ := set $models.http $cell.name (get $cell.tokenizer.settings "served-model-name" | default $model) }}
  {{- end }}
  {{- $_ := set $schemes $cell.name (ternary "none" "TLS" $cell.tls.insecure) }}
{{- end }}
{{- $names := list }}{{ $members := dict "grpc" (list) "http" (list) }}
{{- range $pool := $root.Values.inferencePools }}
  {{- $at := printf "inferencePools[%s]" $pool.name }}{{ $protocol := include "lockstep.protocol" $pool }}
  {{- if has $pool.name $names }}{{ fail (printf "inferencePools: the name %q is used twice" $pool.name) }}{{ end }}
  {{- $names = append $names $pool.name }}
  {{- $served := list }}{{ $spoken := list }}
  {{- range $cell := $pool.cells }}
    {{- if not (hasKey $models.grpc $cell) }}{{ fail (printf "%s.cells: there is no cell %q" $at $cell) }}{{ end }}
    {{- if not (hasKey (get $models $protocol) $cell) }}
      {{- fail (printf "%s.protocol: the cell %q has tokenizer.http.enabled: false" $at $cell) }}
    {{- end }}
    {{- if has $cell (get $members $protocol) }}
      {{- fail (printf "%s.cells: %q is in another pool too" $at $cell) }}
    {{- end }}
    {{- $_ := set $members $protocol (append (get $members $protocol) $cell) }}
    {{- $served = append $served (get (get $models $protocol) $cell) | uniq }}
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
